// The typed XLA FFI handler `jtile_cpu`: instantiate loads the kernel of a call site, execute runs its grid.
#include <cstddef>
#include <memory>
#include <string_view>
#include <vector>

#include "error.h"
#include "program.h"
#include "xla/ffi/api/ffi.h"

namespace jtile {
namespace {

namespace ffi = xla::ffi;

// The state of one call site; XLA deletes it with the executable.
struct CpuState {
  static ffi::TypeId id;
  explicit CpuState(const Attributes& attributes) : program(attributes) {}
  Program program;
};
ffi::TypeId CpuState::id = {};

ffi::Error to_ffi(const Error& error) {
  switch (error.code()) {
    case Code::kInvalidArgument:
      return {ffi::ErrorCode::kInvalidArgument, error.what()};
    case Code::kFailedPrecondition:
      return {ffi::ErrorCode::kFailedPrecondition, error.what()};
    case Code::kResourceExhausted:
      return {ffi::ErrorCode::kResourceExhausted, error.what()};
    case Code::kInternal:
      break;
  }
  return {ffi::ErrorCode::kInternal, error.what()};
}

template <typename T>
T attribute(ffi::Dictionary attrs, std::string_view name) {
  ffi::ErrorOr<T> value = attrs.get<T>(name);
  if (value.has_error())
    fail(Code::kInvalidArgument, "the attribute '", name, "' of a jtile_cpu call: ", value.error().message());
  return *value;
}

std::vector<int64_t> optional_numbers(ffi::Dictionary attrs, std::string_view name) {
  if (!attrs.contains(name)) return {};
  auto numbers = attribute<ffi::Span<const int64_t>>(attrs, name);
  return {numbers.begin(), numbers.end()};
}

ffi::ErrorOr<std::unique_ptr<CpuState>> instantiate(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attrs) {
  try {
    return std::make_unique<CpuState>(Attributes{
        .image = attribute<std::string_view>(attrs, "image"),
        .name = attribute<std::string_view>(attrs, "name"),
        .isa = attribute<std::string_view>(attrs, "isa"),
        .sites = attribute<std::string_view>(attrs, "sites"),
        .programs = attribute<int64_t>(attrs, "programs"),
        .workspace = attribute<int64_t>(attrs, "workspace"),
        .cost = attribute<int64_t>(attrs, "cost"),
        .dims = optional_numbers(attrs, "dims"),
    });
  } catch (const Error& error) {
    return to_ffi(error);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

// The addresses of operands and results, without an allocation for all but very wide calls.
class Pointers {
 public:
  explicit Pointers(size_t count)
      : large_(count > kSmall ? count : 0), data_(count > kSmall ? large_.data() : small_) {}
  void*& operator[](size_t k) { return data_[k]; }
  void* const* data() const { return data_; }

 private:
  static constexpr size_t kSmall = 48;
  void* small_[kSmall];
  std::vector<void*> large_;
  void** data_;
};

Launch launch_of(const Program& program, ffi::RemainingArgs args) {
  const std::vector<Dimension>& dimensions = program.dimensions();
  if (dimensions.empty()) return program.launch(nullptr);
  std::vector<int64_t> sizes;
  for (const Dimension& d : dimensions) {
    ffi::ErrorOr<ffi::AnyBuffer> arg = args.get<ffi::AnyBuffer>(static_cast<size_t>(d.operand));
    if (arg.has_error() || d.axis >= static_cast<int64_t>(arg->dimensions().size()))
      fail(Code::kInvalidArgument, "kernel ", program.name(), ": it has no axis ", d.axis, " of operand ", d.operand);
    sizes.push_back(arg->dimensions()[static_cast<size_t>(d.axis)]);
  }
  return program.launch(sizes.data());
}

ffi::Error execute(CpuState* state, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary) {
  Pointers bufs(args.size() + rets.size());
  for (size_t k = 0; k < args.size(); ++k) {
    ffi::ErrorOr<ffi::AnyBuffer> arg = args.get<ffi::AnyBuffer>(k);
    if (arg.has_error()) return arg.error();
    bufs[k] = arg->untyped_data();
  }
  for (size_t k = 0; k < rets.size(); ++k) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> ret = rets.get<ffi::AnyBuffer>(k);
    if (ret.has_error()) return ret.error();
    bufs[args.size() + k] = (**ret).untyped_data();
  }
  try {
    const Program& program = state->program;
    const Launch launch = launch_of(program, args);
    int64_t workers = program.workers(launch, pool.num_threads());
    if (workers == 1) {
      program.run_serial(launch, bufs.data());
    } else {
      program.run_parallel(launch, bufs.data(), workers,
                           [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
    }
  } catch (const Error& error) {
    return to_ffi(error);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
  return ffi::Error::Success();
}

}  // namespace

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(jtile_cpu_instantiate, instantiate,
                              ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jtile_cpu_execute, execute,
    ffi::Ffi::Bind().Ctx<ffi::State<CpuState>>().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

// What `jax.ffi.register_ffi_type` asks for.
extern "C" void* jtile_cpu_type_id() { return &CpuState::id; }
extern "C" void* jtile_cpu_type_info() {
  static ffi::TypeInfo info = ffi::MakeTypeInfo<CpuState>();
  return &info;
}

#pragma GCC visibility pop

}  // namespace jtile
