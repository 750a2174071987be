//! The linker's options of the shared library.

fn main() {
    // A program that has loaded the library by its path finds it again by this name, before the system's driver.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
    // Its threads never end: the library must stay loaded although a caller closes it.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rerun-if-changed=build.rs");
}
