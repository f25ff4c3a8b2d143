//! Shows values and keys of a file in messages: short, on one line, and without secrets.

use serde_json::Value;

/// Formats a value for a message: short, on one line, and hidden if it may be a secret.
pub fn shown(key: &str, value: &Value) -> String {
    match value {
        Value::Object(_) => "a section".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Null => "nothing".to_owned(),
        _ if is_secret(key) => "a value (not shown)".to_owned(),
        Value::String(text) if text.contains("://") && text.contains('@') => "a value (not shown)".to_owned(),
        Value::String(text) if text.contains("PRIVATE KEY") => "a value (not shown)".to_owned(),
        Value::String(text) => shown_text(text),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

/// Formats a text that is not a secret for a message.
pub fn shown_text(text: &str) -> String {
    format!("\"{}\"", shortened(text))
}

/// Formats a key of the file for a message.
pub fn plain_key(key: &str) -> String {
    if !key.is_empty()
        && key.len() <= 64
        && key.chars().all(|c| c.is_ascii_alphanumeric() || "_-/$".contains(c))
    {
        key.to_owned()
    } else {
        format!("\"{}\"", shortened(key))
    }
}

fn shortened(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut shown: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST).is_some() {
        shown.push('…');
    }
    shown
}

/// Whether the name of a key suggests that its value, even a mistyped one, is a secret.
fn is_secret(key: &str) -> bool {
    const WORDS: [&str; 9] =
        ["secret", "secrets", "password", "token", "tokens", "credential", "credentials", "dsn", "key"];
    // Limits are numbers "per token", and a key prefix is part of a name.
    key == "connection_string"
        || (!key.contains("per_token")
            && key != "key_prefix"
            && key.split('_').any(|word| WORDS.contains(&word)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_and_containers_are_never_shown() {
        for key in
            ["authentication_secret_file", "password_file", "tokens", "dsn", "key_file", "connection_string"]
        {
            assert_eq!(shown(key, &json!("hunter2")), "a value (not shown)", "{key}");
            assert_eq!(shown(key, &json!(12345)), "a value (not shown)", "{key}");
        }
        assert_eq!(shown("address", &json!("https://user:hunter2@host")), "a value (not shown)");
        assert_eq!(shown("address", &json!({"password": "hunter2"})), "a section");
        assert_eq!(shown("address", &json!(["hunter2"])), "a list");
        assert_eq!(shown("connections_per_token_per_minute", &json!("many")), "\"many\"");
        assert_eq!(shown("max_connection_age", &json!("soon")), "\"soon\"");
    }

    #[test]
    fn long_values_and_line_breaks_are_shown_short_and_on_one_line() {
        assert_eq!(shown("a", &json!("x\ny")), "\"x\\ny\"");
        assert_eq!(shown("a", &json!("é".repeat(100))).chars().count(), 60 + 3);
        assert_eq!(plain_key("a\u{1b}[31m"), "\"a\\u{1b}[31m\"");
    }
}
