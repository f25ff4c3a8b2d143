//! The program `kas`, with the switches of the bug museum, and with records of other versions: see the
//! feature `flaws`.

use std::process::ExitCode;

#[path = "../main.rs"]
mod program;

fn main() -> ExitCode {
    program::main()
}
