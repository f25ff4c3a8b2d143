//! YAML as values: reading it, and writing it in the style of kubectl.

use serde_json::Value;

/// The limits as a multiple of the default limits of the parser: 100,000 entries.
const SCALE: usize = 40;

/// Words that are not texts in YAML without quotes.
const WORDS: [&str; 9] = ["true", "false", "yes", "no", "on", "off", "y", "n", "null"];

/// Parses one YAML document. An empty text, or only comments, is null. Returns `None` if it is not YAML.
pub(crate) fn parse(text: &str) -> Option<Value> {
    if is_blank(text) {
        return Some(Value::Null);
    }
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 1_000_000 * SCALE,
            max_nodes: 250_000 * SCALE,
            max_documents: 2,
        },
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options).ok()
}

/// Whether a text has no content, only comments.
pub(crate) fn is_blank(text: &str) -> bool {
    let is_blank = |line: &str| line.is_empty() || line.starts_with('#') || line == "---";
    text.lines().map(str::trim).all(is_blank)
}

/// Returns a text as a YAML scalar on one line.
pub(crate) fn scalar(text: &str) -> String {
    let is_plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./:+=".contains(&byte))
        && !text.ends_with(':')
        && !WORDS.contains(&text.to_ascii_lowercase().as_str());
    // A JSON string is a YAML scalar.
    if is_plain { text.to_owned() } else { Value::from(text).to_string() }
}

/// Returns a value in block style, each line indented. Keys are sorted and lists are not indented further, as
/// kubectl writes them.
pub(crate) fn block(value: &Value, indent: usize) -> String {
    let mut text = String::new();
    write(&mut text, value, indent);
    text
}

fn write(out: &mut String, value: &Value, indent: usize) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| key.as_str());
            for (key, value) in entries {
                out.extend(std::iter::repeat_n(' ', indent));
                out.push_str(&scalar(key));
                out.push(':');
                match value {
                    Value::Object(map) if !map.is_empty() => {
                        out.push('\n');
                        write(out, value, indent + 2);
                    }
                    Value::Array(list) if !list.is_empty() => {
                        out.push('\n');
                        write(out, value, indent);
                    }
                    leaf => {
                        out.push(' ');
                        out.push_str(&inline(leaf));
                        out.push('\n');
                    }
                }
            }
        }
        Value::Array(list) if !list.is_empty() => {
            for item in list {
                let dash = format!("{}- ", " ".repeat(indent));
                match item {
                    Value::Object(map) if !map.is_empty() => {
                        let mut inner = String::new();
                        write(&mut inner, item, indent + 2);
                        out.push_str(&dash);
                        out.push_str(inner.trim_start_matches(' '));
                    }
                    other => {
                        out.push_str(&dash);
                        out.push_str(&inline(other));
                        out.push('\n');
                    }
                }
            }
        }
        leaf => {
            out.extend(std::iter::repeat_n(' ', indent));
            out.push_str(&inline(leaf));
            out.push('\n');
        }
    }
}

fn inline(value: &Value) -> String {
    // JSON is YAML in flow style.
    value.as_str().map_or_else(|| value.to_string(), scalar)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn blocks_have_the_style_of_kubectl_and_read_back_equal() {
        let value = json!({
            "name": "x: y",
            "list": [{"b": 1, "a": [["n"], {}, null, "true"]}, "https://kas.test/agents/7"],
            "none": {},
            "deep": {"e": [], "number": "1e5", "null": null, "end": "a:", "hash": "a #b", "empty": ""},
        });
        let text = block(&value, 0);
        assert_eq!(parse(&text).as_ref(), Some(&value), "{text}");
        assert!(text.starts_with("deep:\n  e: []\n"), "{text}");
        assert!(
            text.contains("list:\n- a:\n  - [\"n\"]\n  - {}\n  - null\n  - \"true\"\n  b: 1\n"),
            "{text}"
        );
    }
}
