//! The program `man`: writes the pages of the manual. `cargo xtask man` builds and runs it.

use std::{io::Write as _, path::PathBuf, process::ExitCode};

use clap::Parser;

/// Writes the pages of the manual of kas, agentk and kasctl.
#[derive(Parser)]
#[command(name = "man")]
struct Arguments {
    /// The folder that they go into; it is made when it is not there.
    folder: PathBuf,
}

fn main() -> ExitCode {
    let folder = Arguments::parse().folder;
    match man::write(&folder) {
        Ok(count) => {
            let shown = folder.display();
            // Whoever closed standard output does not want to know.
            let _ =
                writeln!(std::io::stdout(), "{count} pages in {shown}; to read one: man -l {shown}/kas.1");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cannot write the pages into {}: {error}", folder.display());
            ExitCode::FAILURE
        }
    }
}
