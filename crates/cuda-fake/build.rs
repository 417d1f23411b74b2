//! Gives the library the name under which the driver is looked for.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Once a process has loaded it by its path, whoever asks the system's loader for libcuda.so gets it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so");
}
