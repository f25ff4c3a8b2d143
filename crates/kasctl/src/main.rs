//! The program `kasctl`. Everything is in the library.

fn main() -> std::process::ExitCode {
    kasctl::main()
}
