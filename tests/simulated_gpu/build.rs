//! The linker's options of the shared library and of the tests.

fn main() {
    // A program that has loaded the library by its path finds it again by this name, before the system's driver.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    // Its threads never end: the library must stay loaded although a caller closes it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The tests are a profiler plug-in themselves, which is found among the symbols of the program.
    println!("cargo:rustc-link-arg-tests=-Wl,--export-dynamic-symbol=ncclProfiler_v*");
    println!("cargo:rerun-if-changed=build.rs");
}
