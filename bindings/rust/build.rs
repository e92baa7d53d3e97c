// SPDX-License-Identifier: Apache-2.0
//! Where libbifolio_c is: the folder that BIFOLIO_LIB_DIR names, else where the linker looks anyway.

fn main() {
    println!("cargo:rerun-if-env-changed=BIFOLIO_LIB_DIR");
    if let Ok(folder) = std::env::var("BIFOLIO_LIB_DIR") {
        println!("cargo:rustc-link-search=native={folder}");
        println!("cargo:rustc-link-arg=-Wl,-rpath,{folder}");
    }
}
