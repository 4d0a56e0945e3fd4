// A device of torch's private-use back end that computes on the host and behaves like an accelerator: tensors of the
// host do not mix with its own, and each value that is read back, and each tensor that is moved to it, is counted.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
std::atomic<long> reads{0}, writes{0}, operations{0};
std::atomic<bool> next_is_global{false};

// -- memory --

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    return {data, data, &std::free, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};
Memory memory;

at::Tensor over(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto keys = c10::DispatchKeySet(key);
  if (like._is_zerotensor()) keys = keys.add(c10::DispatchKey::ZeroTensor);  // one without memory
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_complex()) impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return result;
}

void release(void* storage) { delete static_cast<c10::Storage*>(storage); }

// Return a storage of another device over the same memory, which it keeps alive.
c10::Storage shared(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
  auto* keep = new c10::Storage(storage);
  void* data = storage.mutable_data();
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(data, keep, &release, device),
                      allocator, /*resizable=*/true);
}

// -- random numbers --

struct Stream final : c10::GeneratorImpl {
  at::Generator host;
  explicit Stream(at::Generator of)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(of)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this stream has no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Stream* clone_impl() const override { return new Stream(host.clone()); }
};

// -- operators --

const std::unordered_set<std::string> kLooks{  // whose shape or number depends on values
    "aten::_local_scalar_dense", "aten::nonzero",    "aten::masked_select",      "aten::_unique2",
    "aten::unique_dim",          "aten::equal",      "aten::unique_consecutive", "aten::bincount",
    "aten::unique_dim_consecutive", "aten::_unique"};
const std::unordered_set<std::string> kNumbersOfHostRefused{  // where even a number of the host is an error
    "aten::cat",       "aten::stack",        "aten::gather",        "aten::scatter",      "aten::scatter_",
    "aten::scatter_add", "aten::scatter_add_", "aten::index_select", "aten::index_add",    "aten::index_add_",
    "aten::index_copy_", "aten::take",         "aten::searchsorted", "aten::_linalg_eigh", "aten::repeat_interleave"};

struct Call {
  const std::string& name;
  const c10::OperatorHandle& op;
  std::vector<at::Tensor> device, host;  // those of the device, and what stands for them on the host
  std::vector<bool> written;
  bool of_host = false, number_of_host = false, host_written = false, mask = false;
  bool draws = false, made_here = false;  // from a stream of the device; a result without other tensors

  at::Tensor lend(const at::Tensor& x, bool writes_to) {
    if (!x.defined()) return x;
    if (x.device().type() != kType) {
      // Torch itself takes numbers of the host anywhere, and indices.
      bool wrapped = x.unsafeGetTensorImpl()->is_wrapped_number();
      bool index = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 ||
                   name.rfind("aten::_unsafe_index", 0) == 0;
      index = index && name.find("select") == std::string::npos && x.scalar_type() != at::kDouble &&
              x.scalar_type() != at::kFloat;
      of_host |= x.dim() > 0 && !index;
      number_of_host |= !wrapped;
      host_written |= writes_to;
      return x;
    }
    for (size_t i = 0; i < device.size(); i++)
      if (device[i].is_same(x)) {
        written[i] = written[i] || writes_to;
        return host[i];
      }
    mask |= x.scalar_type() == at::kBool && x.dim() > 0;
    auto lent = over(shared(x.storage(), c10::kCPU, c10::GetAllocator(c10::kCPU)), x, c10::DispatchKey::CPU);
    if (x.unsafeGetTensorImpl()->is_wrapped_number()) lent.unsafeGetTensorImpl()->set_wrapped_number(true);
    device.push_back(x);
    host.push_back(lent);
    written.push_back(writes_to);
    return lent;
  }

  at::Tensor take_back(const at::Tensor& x) {
    if (!x.defined() || x.device().type() == kType) return x;
    for (size_t i = 0; i < host.size(); i++) {
      if (host[i].is_same(x)) return device[i];
    }
    for (size_t i = 0; i < host.size(); i++)
      if (host[i].storage().is_alias_of(x.storage())) return over(device[i].storage(), x, c10::DispatchKey::PrivateUse1);
    return over(shared(x.storage(), kDevice, &memory), x, c10::DispatchKey::PrivateUse1);
  }
};

void on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  operations++;
  Call call{name, op};
  const size_t first = stack->size() - schema.arguments().size();
  bool masked_index = false;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.arguments()[i].alias_info();
    const bool writes_to = alias && alias->isWrite();
    if (value.isTensor()) {
      value = call.lend(value.toTensor(), writes_to);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& x : list) x = call.lend(x, writes_to);
      value = list;
    } else if (value.isOptionalTensorList()) {
      auto list = value.toOptionalTensorList().copy();
      call.mask = false;
      for (size_t j = 0; j < list.size(); j++) {
        std::optional<at::Tensor> x = list.get(j);
        if (x && x->defined()) list.set(j, call.lend(*x, writes_to));
      }
      masked_index = call.mask;
      value = list;
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == kType, "Expected a generator of the simulated device but found one of ",
                  generator.device(), " (", name, ")");
      value = static_cast<Stream*>(generator.unsafeGetGeneratorImpl())->host;
      call.draws = true;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      call.made_here = true;
      value = c10::Device(c10::kCPU);
    }
  }
  const bool strict = kNumbersOfHostRefused.count(name) || name.rfind("aten::linalg_", 0) == 0;
  TORCH_CHECK(!call.device.size() || !(call.of_host || call.host_written || (strict && call.number_of_host)),
              "Expected all tensors to be on the same device, but found at least two devices, the simulated one and "
              "cpu (", name, ")");
  TORCH_CHECK(!call.draws || call.made_here || call.device.size(),
              "Expected a generator of cpu but found one of the simulated device (", name, ")");
  if (kLooks.count(name) || (masked_index && name != "aten::index")) reads++;
  // Convolutions have a name of their own on such devices, with the same arguments.
  if (name == "aten::convolution_overrideable")
    c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "").callBoxed(stack);
  else
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t i = 0; i < call.device.size(); i++) {  // what was resized has new memory
    const auto& x = call.device[i];
    if (!call.written[i]) continue;
    auto* impl = x.unsafeGetTensorImpl();
    if (call.host[i].storage().data() != x.storage().data() || call.host[i].nbytes() > x.storage().nbytes())
      impl->set_storage_keep_dtype(shared(call.host[i].storage(), kDevice, &memory));
    impl->set_sizes_and_strides(call.host[i].sizes(), call.host[i].strides(), call.host[i].storage_offset());
  }
  const size_t returned = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) {
    auto& value = (*stack)[returned + i];
    if (value.isTensor()) {
      value = call.take_back(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& x : list) x = call.take_back(x);
      value = list;
    }
  }
}

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool) {
  operations++;
  reads += to.device().type() != kType;
  writes += from.device().type() != kType;
  auto host = [](const at::Tensor& x) {
    return x.device().type() == kType
               ? over(shared(x.storage(), c10::kCPU, c10::GetAllocator(c10::kCPU)), x, c10::DispatchKey::CPU)
               : x;
  };
  host(to).copy_(host(from));
  return to;
}

at::Tensor& set_storage(at::Tensor& x, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return x;
}

at::Tensor& set_whole_storage(at::Tensor& x, at::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / x.dtype().itemsize());
  return set_storage(x, std::move(source), 0, {size}, {1});
}

at::Tensor& set_tensor(at::Tensor& x, const at::Tensor& source) {
  return set_storage(x, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("copy_", &copy);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&on_host>());
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
}

// -- what torch asks of a device --

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    const bool global = next_is_global.exchange(false);
    return at::make_generator<Stream>(global ? at::detail::getDefaultCPUGenerator() : at::detail::createCPUGenerator());
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    // The stream of the host, so that both draw the same numbers.
    static at::Generator global = at::make_generator<Stream>(at::detail::getDefaultCPUGenerator());
    return global;
  }
};

const bool ready = [] {
  c10::SetAllocator(kType, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

extern "C" long simulated_reads() { return reads; }
extern "C" long simulated_writes() { return writes; }
extern "C" long simulated_operations() { return operations; }
extern "C" void simulated_next_generator_is_global() { next_is_global = true; }
