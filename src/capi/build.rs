//! Sets the linker options of the C library: its name for the dynamic linker, and that it is never unloaded, because
//! threads of the library run its code until the process ends.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The number is that of `MUSTER_ABI_VERSION` in `status.rs`.
    for argument in ["-Wl,-soname,libmuster.so.1", "-Wl,-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
