"""The object loader: relocations of both architectures, and damaged objects, which it refuses and never follows."""

import re
import struct

import pytest

from jtile import ffi

BASE = 0x123_4567_8000


def refused(image: bytes, arch: str = "x86_64") -> str:
    with pytest.raises(ffi.FfiError, match=r"^the kernel object is refused|relocation|branch target") as error:
        ffi.link_image(image, BASE, arch=arch)
    return str(error.value)


def header(image: bytes, offset: int, fmt: str, value: int) -> bytes:
    return image[:offset] + struct.pack(fmt, value) + image[offset + struct.calcsize(fmt) :]


def sections(image: bytes) -> dict[str, tuple[int, ...]]:
    """Section headers by name: (offset of the header in the file, *its ten fields)."""
    start, count, names = struct.unpack_from("<Q", image, 0x28)[0], *struct.unpack_from("<HH", image, 0x3C)
    rows = [(at, *struct.unpack_from("<IIQQQQIIQQ", image, at)) for at in range(start, start + 64 * count, 64)]
    strings = rows[names][5]
    return {image[strings + row[1] : image.index(b"\0", strings + row[1])].decode(): row for row in rows}


@pytest.fixture(scope="module")
def linked(emit_object, sources) -> bytes:
    return emit_object(sources["linked"], arch="x86_64")


@pytest.fixture(scope="module")
def linked_arm(emit_object, sources) -> bytes:
    return emit_object(sources["linked"], arch="aarch64")


# -- aarch64, linked here and read back ------------------------------------------------------------------------------


def adrp_target(word: int, pc: int) -> int:
    imm = (word >> 5 & 0x7FFFF) << 2 | word >> 29 & 3
    return (pc & ~0xFFF) + ((imm ^ 1 << 20) - (1 << 20) << 12)


def branch_target(word: int, pc: int) -> int:
    return pc + (((word & 0x3FFFFFF) ^ 1 << 25) - (1 << 25)) * 4


def words_of(memory: bytes, start: int, count: int) -> list[int]:
    return list(struct.unpack_from(f"<{count}I", memory, start))


def resolve_pages(memory: bytes, start: int, count: int) -> set[int]:
    """Addresses that pairs of ADRP and ADD / LDR (64 bit) of one register form."""
    out, pages = set(), {}
    for k, word in enumerate(words_of(memory, start, count)):
        if word & 0x9F000000 == 0x90000000:  # adrp xd
            pages[word & 31] = adrp_target(word, BASE + start + 4 * k)
        elif word & 0xFFC00000 == 0x91000000 and word >> 5 & 31 in pages:  # add xd, xn, #imm
            out.add(pages[word >> 5 & 31] + (word >> 10 & 0xFFF))
        elif word & 0xFFC00000 == 0xF9400000 and word >> 5 & 31 in pages:  # ldr xt, [xn, #imm * 8]
            out.add(pages[word >> 5 & 31] + (word >> 10 & 0xFFF) * 8)
    return out


def test_aarch64_addresses_point_at_the_data(linked_arm):
    memory, entry = ffi.link_image(linked_arm, BASE, arch="aarch64")
    size = sections(linked_arm)[".text"][6]
    text = entry & ~0xFFF  # .text starts its segment
    targets = {t - BASE for t in resolve_pages(memory, text, size // 4)}
    assert len(targets) >= 3 and all(0 <= t < len(memory) for t in targets)
    table, exported = struct.pack("<4q", 10, 20, 30, 40), struct.pack("<4q", 1, 2, 3, 4)
    found = {"table" for t in targets if memory[t : t + 32] == table}
    for t in targets:
        slot = struct.unpack_from("<Q", memory, t)[0] - BASE
        if 0 <= slot < len(memory) - 32:  # a slot of the GOT, or the constant array of pointers
            found |= {"pointer to table"} if memory[slot : slot + 32] == table else set()
            found |= {"exported"} if memory[slot : slot + 32] == exported else set()
    assert {"exported", "pointer to table"} <= found


def test_aarch64_call_reaches_the_function(emit_object):
    text = """
    define internal i32 @inner(i64 %x) noinline { %y = trunc i64 %x to i32 ret i32 %y }
    define internal i32 @other(i64 %x) noinline section ".text.other" {
      %y = call i32 @inner(i64 %x)
      %z = add i32 %y, 1
      ret i32 %z
    }
    define i32 @jtile_entry(ptr %a, ptr %b, i64 %c, i64 %d, ptr %e, ptr %f) {
      %x = call i32 @other(i64 %c)
      %y = add i32 %x, 1
      ret i32 %y
    }"""
    image = emit_object(text, arch="aarch64", opt=0)
    memory, entry = ffi.link_image(image, BASE, arch="aarch64")
    kinds = {"call": [], "ret": []}
    start = entry & ~0xFFF
    for k, word in enumerate(words_of(memory, start, (len(memory) - start) // 4)):
        if word >> 26 == 0b100101:  # bl
            kinds["call"].append(branch_target(word, BASE + start + 4 * k) - BASE)
    assert len(kinds["call"]) == 2
    assert all(start <= target < len(memory) and target % 4 == 0 for target in kinds["call"])
    assert start in kinds["call"]  # @inner comes first in .text


def test_aarch64_load_relocations_of_every_width(emit_object):
    widths = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "<2 x i64>": 16}
    body, data = [], []
    for k, (ty, width) in enumerate(widths.items()):
        data.append(f'@g{k} = internal global {ty} zeroinitializer, align {width}, section ".data"')
        body.append(f"  %v{k} = load volatile {ty}, ptr @g{k}, align {width}")
    text = "\n".join(data) + "\ndefine i32 @jtile_entry(ptr %a, ptr %b, i64 %c, i64 %d, ptr %e, ptr %f) {\n"
    image = emit_object(text + "\n".join(body) + "\n  ret i32 0\n}", arch="aarch64")
    memory, entry = ffi.link_image(image, BASE, arch="aarch64")
    words = words_of(memory, entry, 40)
    offsets, pages = [], {}
    for k, word in enumerate(words[: words.index(0xD65F03C0)]):  # up to ret
        if word & 0x9F000000 == 0x90000000:
            pages[word & 31] = adrp_target(word, BASE + entry + 4 * k) - BASE
        elif word & 0x3B000000 == 0x39000000:  # ldr with an unsigned offset
            scale = 4 if word >> 26 & 1 and word >> 23 & 1 else word >> 30
            offsets.append(pages[word >> 5 & 31] + ((word >> 10 & 0xFFF) << scale))
    assert len(offsets) == 5 and len(set(offsets)) == 5
    assert all(at % width == 0 and at < len(memory) for at, width in zip(offsets, widths.values(), strict=True))


# -- x86-64 ----------------------------------------------------------------------------------------------------------


def test_linking_does_not_depend_on_the_address_but_in_pointers(linked):
    first, entry = ffi.link_image(linked, BASE, arch="x86_64")
    second, entry2 = ffi.link_image(linked, BASE + 0x1000, arch="x86_64")
    assert entry == entry2 and len(first) == len(second) and len(first) % 4096 == 0
    changed = [k for k in range(0, len(first), 8) if first[k : k + 8] != second[k : k + 8]]
    assert 2 <= len(changed) <= 3  # the table of two pointers, and the GOT unless LLVM wrote none
    for k in changed:
        assert struct.unpack_from("<Q", second, k)[0] - struct.unpack_from("<Q", first, k)[0] == 0x1000


def test_absolute_32_bit_relocations_are_range_checked(emit_object, sources):
    image = emit_object(sources["linked"], arch="x86_64", reloc="static")
    assert relocation_types(image) & {10, 11}  # R_X86_64_32, R_X86_64_32S
    assert "out of range" in refused(image)
    ffi.link_image(image, 0x10000, arch="x86_64")


def relocation_types(image: bytes) -> set[int]:
    rows = [row for name, row in sections(image).items() if name.startswith(".rela.") and "eh_frame" not in name]
    return {struct.unpack_from("<I", image, at + 8)[0] for row in rows for at in range(row[5], row[5] + row[6], 24)}


# -- refusals --------------------------------------------------------------------------------------------------------


def test_foreign_architectures(linked, linked_arm):
    assert "it is code for aarch64 (ELF machine 183), but this process runs on x86_64" in refused(linked_arm, "x86_64")
    assert "it is code for x86_64" in refused(linked, "aarch64")
    assert "another processor" in refused(header(linked, 18, "<H", 8))


def test_undefined_symbols_are_named(emit_object):
    text = """declare float @expf(float)
    define i32 @jtile_entry(ptr %a, ptr %b, i64 %c, i64 %d, ptr %e, ptr %f) {
      %x = load float, ptr %a
      %y = call float @expf(float %x)
      store float %y, ptr %a
      ret i32 0
    }"""
    assert "it needs the symbol 'expf'" in refused(emit_object(text, arch="x86_64"))
    assert "it needs the symbol 'expf'" in refused(emit_object(text, arch="aarch64"), "aarch64")


def test_entry_must_be_a_function_of_the_object(emit_object):
    assert "does not define the function 'jtile_entry'" in refused(emit_object("define i32 @main() { ret i32 0 }"))
    assert "not in a section of code" in refused(emit_object("@jtile_entry = global i64 0"))
    local = """define internal i32 @jtile_entry() { ret i32 0 }
    define i32 @f() noinline { %x = call i32 @jtile_entry() ret i32 %x }"""
    assert "does not define" in refused(emit_object(local, opt=0))


def test_constructors_and_thread_locals(emit_object):
    main = "define i32 @jtile_entry() { ret i32 0 }\n"
    ctor = """define internal void @c() { ret void }
    @llvm.global_ctors = appending global [1 x { i32, ptr, ptr }] [{ i32, ptr, ptr } { i32 1, ptr @c, ptr null }]"""
    assert re.search(r"section '\.(init_array|ctors).*not supported", refused(emit_object(main + ctor)))
    tls = "@t = internal thread_local global i64 3\ndefine ptr @g() { ret ptr @t }"
    assert re.search("thread-local|needs the symbol", refused(emit_object(main + tls)))


@pytest.mark.parametrize(
    ("offset", "fmt", "value", "message"),
    [
        (0, "<I", 0, "magic number"),
        (4, "<B", 1, "little-endian ELF64"),
        (5, "<B", 2, "little-endian ELF64"),
        (6, "<B", 7, "version"),
        (16, "<H", 3, "not a relocatable object"),
        (0x28, "<Q", 2**64 - 1, "table of sections"),
        (0x28, "<Q", 2**63, "table of sections"),
        (0x3A, "<H", 0, "section headers have 0 bytes"),
        (0x3C, "<H", 0, "no section headers"),
        (0x3C, "<H", 65535, "table of sections"),
        (0x3E, "<H", 65535, "section names"),
    ],
)
def test_damaged_file_header(linked, offset, fmt, value, message):
    assert message in refused(header(linked, offset, fmt, value))


@pytest.mark.parametrize(
    ("section", "field", "fmt", "value", "message"),
    [
        (".text", 0, "<I", 2**32 - 1, "lies outside its string table"),
        (".text", 4, "<I", 9, "type 9"),
        (".text", 8, "<Q", 7, "writable code"),
        (".text", 24, "<Q", 2**64 - 8, "lies outside its"),
        (".text", 32, "<Q", 2**64 - 1, "outside|too many"),
        (".text", 48, "<Q", 3, "alignment of 3"),
        (".text", 48, "<Q", 1 << 40, "alignment of"),
        (".bss", 32, "<Q", 2**63, "too many"),
        (".bss", 32, "<Q", 1 << 40, "too many"),
        (".rela.text", 44, "<I", 60000, "does not exist"),
        (".rela.text", 40, "<I", 0, "another symbol table"),
        (".rela.text", 56, "<Q", 16, "wrong format"),
        (".rela.text", 32, "<Q", 25, "wrong format"),
        (".symtab", 56, "<Q", 25, "wrong size"),
        (".symtab", 40, "<I", 999, "no string table"),
        (".symtab", 4, "<I", 1, "no symbol table"),
        (".symtab", 32, "<Q", 24, "names symbol"),
    ],
)
def test_damaged_section_header(linked, section, field, fmt, value, message):
    at = sections(linked)[section][0]
    assert re.search(message, refused(header(linked, at + field, fmt, value)))


@pytest.mark.parametrize(
    ("field", "fmt", "value", "message"),
    [
        (0, "<Q", 2**64 - 2, "lies outside section"),
        (0, "<Q", 1 << 20, "lies outside section"),
        (8, "<I", 200, "relocation type 200 is not supported"),
        (8, "<I", 18, "relocation type 18 is not supported"),
        (12, "<I", 2**32 - 1, "names symbol 4294967295"),
        (16, "<q", 2**62, "out of range"),
        (16, "<q", -(2**31) - 2**20, "out of range"),
    ],
)
def test_damaged_relocation(linked, field, fmt, value, message):
    at = sections(linked)[".rela.text"][5]
    assert message in refused(header(linked, at + field, fmt, value))


@pytest.mark.parametrize(
    ("field", "fmt", "value", "message"),
    [
        (0, "<I", 2**31, "name of a symbol"),
        (6, "<H", 0xFFF2, "kind that is not supported"),
        (6, "<H", 0xFF00, "kind that is not supported"),
        (6, "<H", 500, "section 500, which does not exist"),
        (8, "<Q", 2**64 - 1, "outside its section"),
    ],
)
def test_damaged_symbol(linked, field, fmt, value, message):
    row = sections(linked)[".symtab"]
    last = row[5] + row[6] - 24
    assert message in refused(header(linked, last + field, fmt, value))


def test_truncated_at_every_length(linked, linked_arm):
    for image, arch in ((linked, "x86_64"), (linked_arm, "aarch64")):
        for n in range(len(image)):
            refused(image[:n], arch)


def test_random_damage_never_crashes(run_python):
    """Thousands of objects with flipped, set and swapped bytes are linked (never run) in a process of their own."""
    out = run_python(
        """
        import random
        from jtile import ffi
        image = open("linked.o", "rb").read()
        random.seed(1)
        refused = 0
        special = [0, 1, 0x7f, 0x80, 0xff]
        for k in range(12000):
            damaged = bytearray(image)
            for _ in range(random.choice([1, 1, 2, 8, 64])):
                at = random.randrange(len(damaged))
                if random.random() < 0.5:
                    damaged[at] ^= 1 << random.randrange(8)
                else:
                    n = random.choice([1, 2, 4, 8])
                    damaged[at:at + n] = bytes([random.choice(special)]) * len(damaged[at:at + n])
            try:
                if k % 4:
                    ffi.link_image(bytes(damaged), 0x123000, arch=ffi._run.host_arch())
                else:
                    ffi.LoadedImage(bytes(damaged), programs=1)  # mapped and protected too
            except ffi.FfiError as error:
                refused += "refused" in str(error) or "relocation" in str(error)
        print(refused, ffi.images_alive())
        """
    )
    refusals, alive = map(int, out.split())
    assert 2000 < refusals < 12000 and alive == 0
