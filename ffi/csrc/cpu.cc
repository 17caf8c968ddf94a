// The typed XLA FFI handler `jtile_cpu`: instantiate loads the kernel of a call site, execute runs its grid.
#include <cstddef>
#include <memory>
#include <mutex>
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

// XLA asks a handler for its metadata before it takes it, and the type of its state must be known by then. Registered
// here, and not by jax.ffi.register_ffi_type, it is known whenever the targets are registered: JAX keeps what comes
// before there is a backend, and hands targets on before types.
XLA_FFI_Error* register_state(XLA_FFI_CallFrame* frame) {
  static std::mutex mutex;
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CpuState>();
  std::lock_guard lock(mutex);
  if (CpuState::id.type_id != 0) return nullptr;
  return ffi::Ffi::RegisterTypeId(frame->api, "jtile_cpu_state", &CpuState::id, &info);
}

bool asks_for_metadata(const XLA_FFI_CallFrame* frame) {
  return frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata;
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate,
                       ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(
    execute_handler, execute,
    ffi::Ffi::Bind().Ctx<ffi::State<CpuState>>().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jtile_cpu_instantiate(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame))
    if (XLA_FFI_Error* error = register_state(frame)) return error;
  return instantiate_handler(frame);
}

extern "C" XLA_FFI_Error* jtile_cpu_execute(XLA_FFI_CallFrame* frame) {
  if (asks_for_metadata(frame))
    if (XLA_FFI_Error* error = register_state(frame)) return error;
  return execute_handler(frame);
}

#pragma GCC visibility pop

}  // namespace jtile
