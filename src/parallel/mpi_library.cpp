#include "parallel/mpi_library.h"

#include <algorithm>
#include <array>

#include "parallel/mpi.h"

namespace sbtrain {
namespace {

SharedLibrary open_library() {
  return {"MPI",
          {SBTRAIN_MPI_NAME, SBTRAIN_MPI_LIBRARY},
          "install it (on Debian and Ubuntu: apt-get install openmpi-bin), or train with one rank"};
}

MpiFunctions load(const SharedLibrary& library) {
  MpiFunctions functions;
#define SBTRAIN_FIND(name) library.find(functions.name, "MPI_" #name);
  SBTRAIN_MPI_FUNCTIONS(SBTRAIN_FIND)
#undef SBTRAIN_FIND
#ifdef OPEN_MPI
  functions.comm_world = static_cast<MPI_Comm>(library.variable("ompi_mpi_comm_world"));
  functions.byte = static_cast<MPI_Datatype>(library.variable("ompi_mpi_byte"));
  functions.errors_return = static_cast<MPI_Errhandler>(library.variable("ompi_mpi_errors_return"));
#else  // MPICH and its relatives: numbers of the header
  functions.comm_world = MPI_COMM_WORLD;
  functions.byte = MPI_BYTE;
  functions.errors_return = MPI_ERRORS_RETURN;
#endif
  return functions;
}

}  // namespace

const MpiFunctions& mpi() {
  static const MpiFunctions kFunctions = load(open_library());
  return kFunctions;
}

FoundLibrary find_mpi() {
  return look_for("MPI", [](FoundLibrary& found) {
    found.path = open_library().path();
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    mpi().Get_library_version(text.data(), &length);
    const std::string whole(text.data(), static_cast<size_t>(length));
    // Of "Open MPI v4.1.4, package: ..." and of MPICH's list, one item a line, the first item.
    found.version = whole.substr(0, whole.find_first_of(",\n"));
    std::ranges::replace(found.version, '\t', ' ');
  });
}

}  // namespace sbtrain
