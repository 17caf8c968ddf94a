// The typed XLA FFI handler `jtile_cpu`: instantiate loads the kernel of a call site, execute runs its grid.
#include <memory>
#include <vector>

#include "handlers.h"
#include "program.h"

namespace jtile {
namespace {

constexpr std::string_view kTarget = "jtile_cpu";
const HandlerLine line("cpu", "cpu", "jtile_cpu", "instantiate,execute");

// The state of one call site; XLA deletes it with the executable.
struct CpuState {
  static ffi::TypeId id;
  explicit CpuState(const Attributes& attributes) : program(attributes) {}
  Program program;
};
ffi::TypeId CpuState::id = {};

std::vector<int64_t> optional_numbers(ffi::Dictionary attrs, std::string_view name) {
  if (!attrs.contains(name)) return {};
  auto numbers = attribute<ffi::Span<const int64_t>>(attrs, name, kTarget);
  return {numbers.begin(), numbers.end()};
}

ffi::ErrorOr<std::unique_ptr<CpuState>> instantiate(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attrs) {
  return guarded<ffi::ErrorOr<std::unique_ptr<CpuState>>>([&] {
    return std::make_unique<CpuState>(Attributes{
        .image = attribute<std::string_view>(attrs, "image", kTarget),
        .name = attribute<std::string_view>(attrs, "name", kTarget),
        .isa = attribute<std::string_view>(attrs, "isa", kTarget),
        .sites = attribute<std::string_view>(attrs, "sites", kTarget),
        .programs = attribute<int64_t>(attrs, "programs", kTarget),
        .workspace = attribute<int64_t>(attrs, "workspace", kTarget),
        .cost = attribute<int64_t>(attrs, "cost", kTarget),
        .dims = optional_numbers(attrs, "dims"),
    });
  });
}

Launch launch_of(const Program& program, ffi::RemainingArgs args) {
  std::vector<int64_t> sizes;
  for (const Dimension& d : program.dimensions())
    sizes.push_back(size_of_axis(args, d.operand, d.axis, program.name()));
  return program.launch(sizes.empty() ? nullptr : sizes.data());
}

ffi::Error execute(CpuState* state, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ffi::Dictionary) {
  PerArray<void*> bufs(args.size() + rets.size());
  ffi::Error bad = each_array(args, rets, [&](size_t k, ffi::AnyBuffer& buffer) { bufs[k] = buffer.untyped_data(); });
  if (bad.failure()) return bad;
  return guarded<ffi::Error>([&] {
    const Program& program = state->program;
    const Launch launch = launch_of(program, args);
    int64_t workers = program.workers(launch, pool.num_threads());
    if (workers == 1) {
      program.run_serial(launch, bufs.data());
    } else {
      program.run_parallel(launch, bufs.data(), workers,
                           [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); });
    }
    return ffi::Error::Success();
  });
}

XLA_FFI_DEFINE_HANDLER(instantiate_handler, instantiate,
                       ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(
    execute_handler, execute,
    ffi::Ffi::Bind().Ctx<ffi::State<CpuState>>().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

}  // namespace

#pragma GCC visibility push(default)

extern "C" XLA_FFI_Error* jtile_cpu_instantiate(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<CpuState>(frame, "jtile_cpu_state")) return error;
  return instantiate_handler(frame);
}

extern "C" XLA_FFI_Error* jtile_cpu_execute(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<CpuState>(frame, "jtile_cpu_state")) return error;
  return execute_handler(frame);
}

#pragma GCC visibility pop

}  // namespace jtile
