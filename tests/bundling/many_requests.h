// Included ahead of the driver's main.cpp: without words, the program handles the requests on its standard input, one a line, and
// writes "begin" ahead of each and "status N" after it. One process for many requests loads libtorch once.
#include <array>
#include <iostream>
#include <sstream>
#include <string>

int one_request(int count, char** words);

int main(int count, char** words) {
  if (count > 1) return one_request(count, words);
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream rest(line);
    std::array<std::string, 5> given{"bundle_driver"};
    std::array<char*, 5> pointers{};
    for (size_t k = 1; k < given.size(); ++k) rest >> given[k];
    for (size_t k = 0; k < given.size(); ++k) pointers[k] = given[k].data();
    std::cout << "begin" << std::endl;
    const int status = one_request(5, pointers.data());
    std::cout << "status " << status << std::endl;
  }
  return 0;
}

#define main one_request
