// The typed XLA FFI handlers `jtile_cpu`: instantiate loads the kernel of a call site, execute runs its grid;
// `jtile_cpu_devices` for kernels that talk to other devices, whose last operand says where this one is; and
// `jtile_cpu_graph` for several kernels in one call, `jtile_cpu_graph_devices` for one call on several devices, whose last
// operand says where this one is.
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "devices.h"
#include "handlers.h"
#include "program.h"
#include "tasks.h"

namespace jtile {
namespace {

constexpr std::string_view kTarget = "jtile_cpu";
constexpr std::string_view kTalking = "jtile_cpu_devices";
constexpr std::string_view kGraph = "jtile_cpu_graph";
const HandlerLine line("cpu", "cpu", "jtile_cpu", "instantiate,execute");
const HandlerLine talking_line("cpu", "cpu", "jtile_cpu_devices", "instantiate,execute");
constexpr std::string_view kTeam = "jtile_cpu_graph_devices";
const HandlerLine team_line("cpu", "cpu", "jtile_cpu_graph_devices", "instantiate,execute");
const HandlerLine graph_line("cpu", "cpu", "jtile_cpu_graph", "instantiate,execute");

// The state of one call site; XLA deletes it with the executable.
struct CpuState {
  static ffi::TypeId id;
  CpuState(const Attributes& attributes, Poison poison) : program(attributes), poison(std::move(poison)) {}
  Program program;
  Poison poison;
};
ffi::TypeId CpuState::id = {};

std::vector<int64_t> optional_numbers(ffi::Dictionary attrs, std::string_view name) {
  if (!attrs.contains(name)) return {};
  auto numbers = attribute<ffi::Span<const int64_t>>(attrs, name, kTarget);
  return {numbers.begin(), numbers.end()};
}

// Those of a kernel; `memory`, `devices` and `timeout` of one that talks are read apart.
Attributes attributes_of(ffi::Dictionary attrs, std::string_view target) {
  return Attributes{
      .image = attribute<std::string_view>(attrs, "image", target),
      .name = attribute<std::string_view>(attrs, "name", target),
      .isa = attribute<std::string_view>(attrs, "isa", target),
      .sites = attribute<std::string_view>(attrs, "sites", target),
      .programs = attribute<int64_t>(attrs, "programs", target),
      .workspace = attribute<int64_t>(attrs, "workspace", target),
      .cost = attribute<int64_t>(attrs, "cost", target),
      .dims = optional_numbers(attrs, "dims"),
  };
}

ffi::ErrorOr<std::unique_ptr<CpuState>> instantiate(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attrs) {
  return guarded<ffi::ErrorOr<std::unique_ptr<CpuState>>>(
      [&] { return std::make_unique<CpuState>(attributes_of(attrs, kTarget), Poison(attrs, kTarget)); });
}

void poisoned(const Poison& poison, ffi::RemainingRets rets, void* const* results) {
  poison.each(rets, [&](size_t k, size_t size, int byte) { std::memset(results[k], byte, size); });
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
    poisoned(state->poison, rets, bufs.data() + args.size());
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

// -- kernels that talk to other devices -------------------------------------------------------------------------------

struct TalkingState {
  static ffi::TypeId id;
  TalkingState(const Attributes& attributes, Shape shape, Poison poison)
      : program(std::make_shared<const Program>(attributes)),
        site(std::make_shared<CallSite>(std::move(shape))),
        poison(std::move(poison)) {}
  std::shared_ptr<const Program> program;
  std::shared_ptr<CallSite> site;
  Poison poison;
};
ffi::TypeId TalkingState::id = {};

ffi::ErrorOr<std::unique_ptr<TalkingState>> instantiate_talking(ffi::RemainingArgs, ffi::RemainingRets,
                                                                ffi::Dictionary attrs) {
  return guarded<ffi::ErrorOr<std::unique_ptr<TalkingState>>>([&] {
    Shape shape(attribute<std::string_view>(attrs, "devices", kTalking), attribute<int64_t>(attrs, "memory", kTalking),
                attribute<int64_t>(attrs, "timeout", kTalking));
    return std::make_unique<TalkingState>(attributes_of(attrs, kTalking), std::move(shape), Poison(attrs, kTalking));
  });
}

// What one device brings to a call of several: the number of its group, its place along each axis, and its arrays,
// without the last operand, which says where the device is.
struct Arrival {
  int64_t group;
  std::vector<int32_t> place;
  std::vector<void*> arrays;
};

Arrival arrival_of(ffi::RemainingArgs args, ffi::RemainingRets rets, const Shape& shape, const std::string& what) {
  ffi::ErrorOr<ffi::AnyBuffer> last = args.get<ffi::AnyBuffer>(args.size() - 1);
  if (last.has_error() || last->element_type() != ffi::DataType::S32 || last->element_count() != shape.axes.size() + 1)
    fail(Code::kInvalidArgument, what, ": its last operand does not say where the device is");
  const auto* numbers = static_cast<const int32_t*>(last->untyped_data());
  Arrival arrival{numbers[0], {numbers + 1, numbers + last->element_count()}, {}};
  ffi::Error bad = each_array(args, rets, [&](size_t k, ffi::AnyBuffer& buffer) {
    if (k != args.size() - 1) arrival.arrays.push_back(buffer.untyped_data());
  });
  if (bad.failure()) fail(Code::kInvalidArgument, bad.message());
  return arrival;
}

// XLA's threads are few: none of them waits for other devices. `begin` starts threads that do, and gives them the
// function that tells XLA of the end: with null, or with the error. What `begin` throws, XLA hears as well.
template <class Begin>
ffi::Future ended_later(const Begin& begin) {
  ffi::Promise promise;
  ffi::Future future(promise);
  try {
    begin([promise](const Error* error) mutable {
      error == nullptr ? promise.SetAvailable() : promise.SetError(to_ffi(*error));
    });
  } catch (const Error& error) {
    promise.SetError(to_ffi(error));
  } catch (const std::exception& error) {
    promise.SetError(ffi::Error::Internal(error.what()));
  }
  return future;
}

ffi::Future execute_talking(TalkingState* state, ffi::RunId run, ffi::RemainingArgs args, ffi::RemainingRets rets,
                            ffi::Dictionary) {
  return ended_later([&](std::function<void(const Error*)> done) {
    const Program& program = *state->program;
    const Shape& shape = state->site->shape();
    auto [group, place, arrays] = arrival_of(args, rets, shape, concat("kernel ", program.name()));
    poisoned(state->poison, rets, arrays.data() + args.size() - 1);  // before others may write there
    auto meeting = state->site->come(run.run_id, group, device_number(shape, place));
    auto call = std::make_shared<DeviceCall>(state->program, state->site, meeting, std::move(place), std::move(done));
    program.run_at_once(launch_of(program, args), std::move(arrays), call);
  });
}

// -- execution graphs -------------------------------------------------------------------------------------------------

// Results of a call: those of the graph, its arena, and, where the attribute `traced` says so, what it writes about itself.
struct GraphState {
  static ffi::TypeId id;
  GraphState(const std::vector<Attributes>& kernels, ffi::Span<const int64_t> plan, int64_t operands, int64_t results,
             bool traced)
      : graph(kernels, plan.begin(), plan.size(), operands, results), traced(traced) {}
  TaskGraph graph;
  const bool traced;
};
ffi::TypeId GraphState::id = {};

std::vector<Attributes> kernels_of(ffi::Dictionary attrs) {
  auto numbers = attribute<ffi::Span<const int64_t>>(attrs, "kernels", kGraph);
  std::vector<Attributes> kernels(numbers.size() / 3);
  for (size_t k = 0; k < kernels.size(); ++k) {
    auto text = [&](const char* what) { return attribute<std::string_view>(attrs, concat(what, k), kGraph); };
    kernels[k].image = text("image"), kernels[k].name = text("name");
    kernels[k].isa = text("isa"), kernels[k].sites = text("sites");
    const int64_t* own = numbers.begin() + 3 * k;
    kernels[k].programs = own[0], kernels[k].workspace = own[1], kernels[k].cost = own[2];
  }
  return kernels;
}

ffi::ErrorOr<std::unique_ptr<GraphState>> instantiate_graph(ffi::RemainingArgs, ffi::RemainingRets,
                                                            ffi::Dictionary attrs) {
  return guarded<ffi::ErrorOr<std::unique_ptr<GraphState>>>([&] {
    const int64_t operands = attribute<int64_t>(attrs, "operands", kGraph);
    const int64_t results = attribute<int64_t>(attrs, "results", kGraph);
    const bool traced = attribute<int64_t>(attrs, "traced", kGraph) != 0;
    auto plan = attribute<ffi::Span<const int64_t>>(attrs, "plan", kGraph);
    return std::make_unique<GraphState>(kernels_of(attrs), plan, operands, results, traced);
  });
}

ffi::Error execute_graph(GraphState* state, ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                         ffi::Dictionary) {
  const size_t count = args.size() + rets.size();
  std::vector<void*> bufs(count);
  ffi::Error bad = each_array(args, rets, [&](size_t k, ffi::AnyBuffer& buffer) { bufs[k] = buffer.untyped_data(); });
  if (bad.failure()) return bad;
  return guarded<ffi::Error>([&] {
    const TaskGraph& graph = state->graph;
    void* arena = bufs[count - 1 - (state->traced ? 1 : 0)];
    auto* trace = state->traced ? static_cast<int64_t*>(bufs[count - 1]) : nullptr;
    graph.run(bufs.data(), arena, graph.workers(pool.num_threads()),
              [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); }, trace);
    return ffi::Error::Success();
  });
}

// -- execution graphs of several devices ------------------------------------------------------------------------------

struct TeamState {
  static ffi::TypeId id;
  TeamState(const std::vector<Attributes>& kernels, ffi::Span<const int64_t> plan, int64_t operands, int64_t results,
            bool traced, Shape shape)
      : graph(std::make_shared<const TaskGraph>(kernels, plan.begin(), plan.size(), operands, results, shape.devices())),
        site(std::make_shared<CallSite>(std::move(shape))),
        traced(traced) {}
  std::shared_ptr<const TaskGraph> graph;
  std::shared_ptr<CallSite> site;
  const bool traced;
};
ffi::TypeId TeamState::id = {};

ffi::ErrorOr<std::unique_ptr<TeamState>> instantiate_team(ffi::RemainingArgs, ffi::RemainingRets,
                                                          ffi::Dictionary attrs) {
  return guarded<ffi::ErrorOr<std::unique_ptr<TeamState>>>([&] {
    Shape shape(attribute<std::string_view>(attrs, "devices", kTeam), 0, attribute<int64_t>(attrs, "timeout", kTeam));
    auto plan = attribute<ffi::Span<const int64_t>>(attrs, "plan", kTeam);
    return std::make_unique<TeamState>(kernels_of(attrs), plan, attribute<int64_t>(attrs, "operands", kTeam),
                                       attribute<int64_t>(attrs, "results", kTeam),
                                       attribute<int64_t>(attrs, "traced", kTeam) != 0, std::move(shape));
  });
}

ffi::Future execute_team(TeamState* state, ffi::RunId run, ffi::RemainingArgs args, ffi::RemainingRets rets,
                         ffi::Dictionary) {
  return ended_later([&](std::function<void(const Error*)> done) {
    const Shape& shape = state->site->shape();
    auto [group, place, arrays] = arrival_of(args, rets, shape, "an execution graph");
    const int64_t device = device_number(shape, place);
    const size_t count = arrays.size();
    void* arena = arrays[count - 1 - (state->traced ? 1 : 0)];
    auto* trace = state->traced ? static_cast<int64_t*>(arrays[count - 1]) : nullptr;
    auto meeting = state->site->come(run.run_id, group, device);
    TaskGraph::run_part(state->graph, {meeting, device, std::move(arrays), arena, trace, std::move(done)},
                        concat("an execution graph on ", shape.device_text(device)));
  });
}

XLA_FFI_DEFINE_HANDLER(instantiate_team_handler, instantiate_team,
                       ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(
    execute_team_handler, execute_team,
    ffi::Ffi::Bind().Ctx<ffi::State<TeamState>>().Ctx<ffi::RunId>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(instantiate_graph_handler, instantiate_graph,
                       ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(
    execute_graph_handler, execute_graph,
    ffi::Ffi::Bind().Ctx<ffi::State<GraphState>>().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(instantiate_talking_handler, instantiate_talking,
                       ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(execute_talking_handler, execute_talking,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::State<TalkingState>>()
                           .Ctx<ffi::RunId>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());

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

extern "C" XLA_FFI_Error* jtile_cpu_devices_instantiate(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<TalkingState>(frame, "jtile_cpu_devices_state")) return error;
  return instantiate_talking_handler(frame);
}

extern "C" XLA_FFI_Error* jtile_cpu_devices_execute(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<TalkingState>(frame, "jtile_cpu_devices_state")) return error;
  return execute_talking_handler(frame);
}

extern "C" XLA_FFI_Error* jtile_cpu_graph_instantiate(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<GraphState>(frame, "jtile_cpu_graph_state")) return error;
  return instantiate_graph_handler(frame);
}

extern "C" XLA_FFI_Error* jtile_cpu_graph_execute(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<GraphState>(frame, "jtile_cpu_graph_state")) return error;
  return execute_graph_handler(frame);
}

extern "C" XLA_FFI_Error* jtile_cpu_graph_devices_instantiate(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<TeamState>(frame, "jtile_cpu_graph_devices_state")) return error;
  return instantiate_team_handler(frame);
}

extern "C" XLA_FFI_Error* jtile_cpu_graph_devices_execute(XLA_FFI_CallFrame* frame) {
  if (XLA_FFI_Error* error = register_state<TeamState>(frame, "jtile_cpu_graph_devices_state")) return error;
  return execute_team_handler(frame);
}

#pragma GCC visibility pop

}  // namespace jtile
