//! Errors as one line of text.

use std::{error::Error, fmt::Write as _};

/// Joins an error and its causes with `: `, and leaves out a cause that the text before it already contains.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut last = text.clone();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        // hyper-util's own error says only which step failed, which the error around it says as well.
        if !last.contains(&cause_text) && !cause_text.starts_with("client error (") {
            let _ = write!(text, ": {cause_text}");
            last = cause_text;
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Layer(&'static str, Option<Box<Layer>>);

    impl fmt::Display for Layer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Layer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn a_repeated_cause_is_left_out() {
        let cause = Layer("refused", None);
        let middle = Layer("cannot connect: refused", Some(Box::new(cause)));
        let client = Layer("client error (Connect)", Some(Box::new(middle)));
        assert_eq!(chain(&Layer("no answer", Some(Box::new(client)))), "no answer: cannot connect: refused");
    }
}
