// What the XLA FFI handlers of all platforms share.
#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "xla/ffi/api/ffi.h"

namespace jtile {

namespace ffi = xla::ffi;

inline ffi::Error to_ffi(const Error& error) {
  switch (error.code()) {
    case Code::kInvalidArgument:
      return {ffi::ErrorCode::kInvalidArgument, error.what()};
    case Code::kFailedPrecondition:
      return {ffi::ErrorCode::kFailedPrecondition, error.what()};
    case Code::kResourceExhausted:
      return {ffi::ErrorCode::kResourceExhausted, error.what()};
    case Code::kUnavailable:
      return {ffi::ErrorCode::kUnavailable, error.what()};
    case Code::kInternal:
      break;
  }
  return {ffi::ErrorCode::kInternal, error.what()};
}

// The attribute of this name; throws Error, which names the target of the call.
template <typename T>
T attribute(ffi::Dictionary attrs, std::string_view name, std::string_view target) {
  ffi::ErrorOr<T> value = attrs.get<T>(name);
  if (value.has_error())
    fail(Code::kInvalidArgument, "the attribute '", name, "' of a ", target, " call: ", value.error().message());
  return *value;
}

// Runs `body`, which gives an ffi::Error or a value; what it throws becomes an error of XLA.
template <typename Result, typename Body>
Result guarded(Body body) {
  try {
    return body();
  } catch (const Error& error) {
    return to_ffi(error);
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

// As many values as a call has arrays, without an allocation for all but very wide calls.
template <typename T>
class PerArray {
 public:
  explicit PerArray(size_t count)
      : large_(count > kSmall ? count : 0), data_(count > kSmall ? large_.data() : small_) {}
  PerArray(const PerArray&) = delete;
  PerArray& operator=(const PerArray&) = delete;
  T& operator[](size_t k) { return data_[k]; }
  const T* data() const { return data_; }

 private:
  static constexpr size_t kSmall = 48;
  T small_[kSmall];
  std::vector<T> large_;
  T* data_;
};

// Calls `put(k, buffer)` for the operands, then the results.
template <typename Put>
ffi::Error each_array(ffi::RemainingArgs args, ffi::RemainingRets rets, Put put) {
  for (size_t k = 0; k < args.size(); ++k) {
    ffi::ErrorOr<ffi::AnyBuffer> arg = args.get<ffi::AnyBuffer>(k);
    if (arg.has_error()) return arg.error();
    put(k, *arg);
  }
  for (size_t k = 0; k < rets.size(); ++k) {
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> ret = rets.get<ffi::AnyBuffer>(k);
    if (ret.has_error()) return ret.error();
    put(args.size() + k, **ret);
  }
  return ffi::Error::Success();
}

// Bytes of an array; two elements of 4 bits share one, and four of 2.
inline size_t bytes_of(const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::S4:
    case ffi::DataType::U4:
    case ffi::DataType::F4E2M1FN:
      return (buffer.element_count() + 1) / 2;
    case ffi::DataType::S2:
    case ffi::DataType::U2:
      return (buffer.element_count() + 3) / 4;
    default:
      return buffer.size_bytes();
  }
}

// What results hold before a kernel runs, where the optional attribute `poison` of its call says so: for each result the
// byte that fills it, or -1 for one that starts from something, or from anything.
class Poison {
 public:
  // Throws Error, which names the target of the call.
  Poison(ffi::Dictionary attrs, std::string_view target) {
    if (!attrs.contains("poison")) return;
    auto bytes = attribute<ffi::Span<const int64_t>>(attrs, "poison", target);
    bytes_.assign(bytes.begin(), bytes.end());
  }

  // Calls `fill(k, size, byte)` for each result k that is to be filled.
  template <typename Fill>
  void each(ffi::RemainingRets rets, Fill fill) const {
    for (size_t k = 0; k < bytes_.size() && k < rets.size(); ++k) {
      if (bytes_[k] < 0) continue;
      ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> ret = rets.get<ffi::AnyBuffer>(k);
      if (ret.has_error()) fail(Code::kInvalidArgument, ret.error().message());
      fill(k, bytes_of(**ret), static_cast<int>(bytes_[k]));
    }
  }

 private:
  std::vector<int64_t> bytes_;
};

// The size of an operand's axis; throws Error, which names the kernel.
inline int64_t size_of_axis(ffi::RemainingArgs args, int64_t operand, int64_t axis, const std::string& kernel) {
  ffi::ErrorOr<ffi::AnyBuffer> arg = args.get<ffi::AnyBuffer>(static_cast<size_t>(operand));
  if (arg.has_error() || axis >= static_cast<int64_t>(arg->dimensions().size()))
    fail(Code::kInvalidArgument, "kernel ", kernel, ": it has no axis ", axis, " of operand ", operand);
  return arg->dimensions()[static_cast<size_t>(axis)];
}

// XLA asks a handler for its metadata before it takes it, and the type of its state must be known by then. Registered
// here, and not by jax.ffi.register_ffi_type, it is known whenever the targets are registered: JAX keeps what comes
// before there is a backend, and hands targets on before types.
template <typename State>
XLA_FFI_Error* register_state(XLA_FFI_CallFrame* frame, std::string_view name) {
  bool asked = frame->extension_start != nullptr && frame->extension_start->type == XLA_FFI_Extension_Metadata;
  if (!asked) return nullptr;
  static std::mutex mutex;
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<State>();
  std::lock_guard lock(mutex);
  if (State::id.type_id != 0) return nullptr;
  return ffi::Ffi::RegisterTypeId(frame->api, name, &State::id, &info);
}

// A line of the table of handlers, for Python: jtile's platform, XLA's, the target, its stages. Each file of handlers has
// one static value of this for each of its targets.
struct HandlerLine {
  HandlerLine(const char* platform, const char* xla, const char* target, const char* stages);
};

}  // namespace jtile
