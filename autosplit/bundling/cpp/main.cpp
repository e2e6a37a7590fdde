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
    std::ifstream source(words[3], std::ios::binary);
    std::vector<at::Tensor> inputs;
    for (const auto& spec : bundle.inputs()) {
      at::Tensor input = at::empty(spec.shape, spec.dtype);
      if (!source.read(static_cast<char*>(input.data_ptr()), static_cast<std::streamsize>(input.nbytes())))
        throw std::runtime_error(std::string("'") + words[3] + "' ends before input '" + spec.name + "'");
      inputs.push_back(input);
    }
    std::ofstream target(words[4], std::ios::binary);
    for (const auto& output : bundle.run(inputs)) {
      const at::Tensor dense = output.contiguous();
      target.write(static_cast<const char*>(dense.data_ptr()), static_cast<std::streamsize>(dense.nbytes()));
    }
    if (!target.flush()) throw std::runtime_error(std::string("'") + words[4] + "' cannot be written");
  } catch (const std::exception& failure) {
    std::cerr << "bundle_driver: " << failure.what() << "\n";
    return 1;
  }
  return 0;
}
