//! Runs a test with and without the flaw that it must detect.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::LazyLock,
};

/// The first word of the lines that `cargo xtask museum` reads.
pub const MARK: &str = "museum:";

/// The variable that chooses the flaw of a process. No program that ships contains its name.
const VARIABLE: &str = "KAS_FLAW";

/// Returns the flaw that the environment chooses for this process, by its name.
pub fn chosen() -> Option<&'static str> {
    static CHOSEN: LazyLock<Option<String>> = LazyLock::new(|| std::env::var(VARIABLE).ok());
    CHOSEN.as_deref()
}

/// Fails unless `test` fails. `flaw` is the name of the flaw that the caller has switched on, and is printed
/// with the reason of the failure.
pub fn must_fail(flaw: &str, test: impl FnOnce()) {
    let why = match catch_unwind(AssertUnwindSafe(test)) {
        Ok(()) => panic!("the test passes with the flaw {flaw}, so it cannot detect it"),
        Err(why) => why,
    };
    println!("{MARK} {flaw} detected: {}", line(&*why));
}

/// Makes the switches of a crate's flaws: `flawed`, which its code asks, and for its tests `must_fail_with`,
/// which they call. There a flaw is switched on for one thread; in a program it is the one that the
/// environment chooses, see [`chosen`].
///
/// A crate uses it in its own tests, and with its feature `flaws` if it has that. In all other builds, its
/// `flawed` is a constant, and it does not depend on this crate.
#[macro_export]
macro_rules! switches {
    ($flaw:ident) => {
        /// Whether `flaw` is the one that the environment chooses for this process.
        #[cfg(not(test))]
        pub(crate) fn flawed(flaw: $flaw) -> bool {
            $crate::exhibit::chosen().is_some_and(|chosen| chosen == ::std::format!("{flaw:?}"))
        }

        #[cfg(test)]
        ::std::thread_local! {
            static ACTIVE: ::std::cell::Cell<Option<$flaw>> = const { ::std::cell::Cell::new(None) };
        }

        /// Whether `flaw` is switched on in this thread.
        #[cfg(test)]
        pub(crate) fn flawed(flaw: $flaw) -> bool {
            ACTIVE.get() == Some(flaw)
        }

        /// Returns the flaw that is switched on in this thread.
        #[cfg(test)]
        #[allow(dead_code)]
        pub(crate) fn active() -> ::std::option::Option<$flaw> {
            ACTIVE.get()
        }

        /// Switches on the flaw of the thread that has started this one.
        #[cfg(test)]
        #[allow(dead_code)]
        pub(crate) fn inherit(flaw: ::std::option::Option<$flaw>) {
            ACTIVE.set(flaw);
        }

        /// Runs `test` with a flaw, and fails unless `test` fails.
        #[cfg(test)]
        pub(crate) fn must_fail_with(flaw: $flaw, test: impl FnOnce()) {
            ACTIVE.set(Some(flaw));
            $crate::exhibit::must_fail(&::std::format!("{flaw:?}"), || {
                let outcome = ::std::panic::catch_unwind(::std::panic::AssertUnwindSafe(test));
                ACTIVE.set(None);
                if let Err(why) = outcome {
                    ::std::panic::resume_unwind(why);
                }
            });
        }
    };
}

/// Returns the message of a panic in one line.
fn line(why: &(dyn Any + Send)) -> String {
    let text = why.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| why.downcast_ref::<&str>().copied()).unwrap_or("it failed");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_passes_with_its_flaw_fails() {
        must_fail("Any", || panic!("as meant"));
        let passed = catch_unwind(|| must_fail("Any", || {}));
        assert!(line(&*passed.unwrap_err()).contains("cannot detect"));
    }
}
