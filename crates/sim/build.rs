//! Compiles the process of a simulation: its clock and its entropy, see `src/process.c`.

use std::{env, error::Error};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=src/process.c");
    cc::Build::new().file("src/process.c").warnings(true).cargo_metadata(false).try_compile("simprocess")?;
    println!("cargo:rustc-link-search=native={}", env::var("OUT_DIR")?);
    // Whole, because nothing of ours refers to it: it takes the place of functions of the C library.
    println!("cargo:rustc-link-lib=static:+whole-archive=simprocess");
    for function in ["ZSTD_createCCtx", "ZSTD_freeCCtx"] {
        println!("cargo:rustc-link-arg=-Wl,--wrap={function}");
    }
    Ok(())
}
