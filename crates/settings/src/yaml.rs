//! Converts YAML text to a JSON value, as 14.1 does (YAML, then JSON, then typed fields).
//!
//! The message of a syntax error contains the position and the parser's reason, never the text itself, which
//! may contain a secret that must not get into the log.

use serde_json::Value;
use serde_saphyr::Error;

use crate::{Problem, show::plain_key};

/// How much a file may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// A configuration written by hand, of far fewer than 250,000 nodes.
    Small,
    /// A list that a program may write, such as the identities of 100,000 agents.
    Large,
}

/// Parses one YAML document; an empty text, or only comments, is `null`.
pub fn parse(yaml: &str, size: Size) -> Result<Value, Problem> {
    // Some editors put a byte order mark at the beginning; it is not part of the document.
    let yaml = yaml.strip_prefix('\u{feff}').unwrap_or(yaml);
    let scale = if size == Size::Large { 40 } else { 1 };
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 1_000_000 * scale,
            max_nodes: 250_000 * scale,
            max_documents: 2,
        },
        // Snippets would quote the file.
        with_snippet: false,
    };
    match serde_saphyr::from_str_with_options::<Value>(yaml, options) {
        Ok(value) => Ok(value),
        Err(Error::Eof { .. }) if is_blank(yaml) => Ok(Value::Null),
        Err(error) => Err(problem(&error)),
    }
}

/// Returns the problem of a file that is not UTF-8.
pub fn not_utf8() -> Problem {
    Problem::shape("file", "bytes that are not UTF-8", "YAML, as UTF-8 text")
}

/// Whether every line is empty, a comment or a document marker.
fn is_blank(yaml: &str) -> bool {
    yaml.lines().map(str::trim).all(|line| line.is_empty() || line.starts_with('#') || line == "---")
}

fn problem(error: &Error) -> Problem {
    let path = match error.location() {
        Some(at) => format!("line {}, column {}", at.line(), at.column()),
        None => "file".to_owned(),
    };
    let (found, expected) = match error.without_snippet() {
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            (format!("`{}` twice", plain_key(key)), "each key once in its section".to_owned())
        }
        Error::DuplicateMappingKey { .. } => {
            ("a key twice".to_owned(), "each key once in its section".to_owned())
        }
        Error::MultipleDocuments { .. } => {
            ("a second document".to_owned(), "one YAML document, without a `---` between parts".to_owned())
        }
        Error::UnknownAnchor { .. } => {
            ("an alias of an unknown anchor".to_owned(), "an anchor above it, or a quoted text".to_owned())
        }
        Error::Budget { .. } | Error::AliasReplayLimitExceeded { .. } => {
            ("more than a configuration can hold".to_owned(), "a smaller or flatter file".to_owned())
        }
        Error::NonFiniteFloat { .. } => {
            ("a number without a finite value".to_owned(), "a finite number, or a quoted text".to_owned())
        }
        // The parser's messages are constants: none of them quotes the input.
        Error::ExternalMessage { msg, .. } => {
            ("text that is not YAML".to_owned(), format!("valid YAML: {msg}"))
        }
        _ => ("text that is not YAML".to_owned(), "valid YAML".to_owned()),
    };
    Problem::shape(path, found, expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_file_and_only_comments_are_null() {
        for yaml in ["", "\n", "# hello\n", "---\n", "---\n# hello\n", "\u{feff}", "null", "~"] {
            assert_eq!(parse(yaml, Size::Small).unwrap(), Value::Null, "{yaml:?}");
        }
    }

    #[test]
    fn a_syntax_error_has_its_position_and_quotes_nothing() {
        for yaml in [
            "api: {",
            "api: hunter2\n\tpassword: hunter2",
            "a: *hunter2",
            "a: 1\n---\na: hunter2",
            "hunter2: \"x",
        ] {
            let text = parse(yaml, Size::Small).unwrap_err().to_string();
            assert!(text.starts_with("line "), "{text}");
            assert!(!text.contains("hunter2"), "{text}");
        }
        assert_eq!(
            parse("a: 1\nb: 2\na: 3\n", Size::Small).unwrap_err().to_string(),
            "line 3, column 1: found `a` twice; expected each key once in its section"
        );
    }

    #[test]
    fn deep_nesting_and_alias_bombs_are_refused() {
        let deep = "[".repeat(5_000);
        assert!(parse(&deep, Size::Small).is_err());
        let mut bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n".to_owned();
        for i in 1..9 {
            let items = vec![format!("*a{}", i - 1); 9].join(",");
            bomb.push_str(&format!("a{i}: &a{i} [{items}]\n"));
        }
        assert!(parse(&bomb, Size::Small).is_err());
    }
}
