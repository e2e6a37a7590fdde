// bundle_driver FOLDER NETWORK INPUTS OUTPUTS: one request. INPUTS and OUTPUTS hold the tensors' elements, row by row, one tensor
// behind the other, without a header.
#include <iostream>

#include "bundle.h"

int main(int count, char** words) {
  if (count != 5) {
    std::cerr << "usage: bundle_driver FOLDER NETWORK INPUTS OUTPUTS\n";
    return 2;
  }
  try {
    const c10::InferenceMode inference;
    Bundle bundle(words[1], words[2]);
    std::ifstream source(words[3], std::ios::binary | std::ios::ate);
    std::streamoff num_bytes = source ? static_cast<std::streamoff>(source.tellg()) : 0;
    source.seekg(0);
    std::vector<at::Tensor> inputs;
    for (const auto& spec : bundle.inputs()) {
      num_bytes -= spec.num_elements * static_cast<int64_t>(at::elementSize(spec.dtype));
      require(num_bytes >= 0, std::string("'") + words[3] + "' ends before input '" + spec.name + "' does");
      at::Tensor input = at::empty(spec.shape, spec.dtype);
      require(bool(source.read(static_cast<char*>(input.data_ptr()), static_cast<std::streamsize>(input.nbytes()))),
              std::string("'") + words[3] + "' cannot be read");
      inputs.push_back(input);
    }
    std::ofstream target(words[4], std::ios::binary);
    for (const auto& output : bundle.run(inputs)) {
      const at::Tensor dense = output.contiguous();
      target.write(static_cast<const char*>(dense.data_ptr()), static_cast<std::streamsize>(dense.nbytes()));
    }
    require(bool(target.flush()), std::string("'") + words[4] + "' cannot be written");
  } catch (const std::exception& failure) {
    std::cerr << "bundle_driver: " << sentence_of(failure) << "\n";
    return 1;
  }
  return 0;
}
