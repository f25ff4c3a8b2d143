//! What a plain scalar of YAML is: as go-yaml v2 resolves it, which kubectl and 14.1 use. So `yes` is true,
//! and `0644` is 420.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::Number;

/// A resolved scalar.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scalar {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
}

/// Resolves a scalar. `tag` is the name of its tag, without the prefix of YAML's own tags.
///
/// # Errors
/// The text is not what the tag says, or has no JSON form.
pub(super) fn resolve(text: &str, plain: bool, tag: Option<&str>) -> Result<Scalar, String> {
    let resolved = match tag {
        None if plain => untagged(text)?,
        Some("str" | "timestamp") | None => Scalar::Text(text.to_owned()),
        Some("binary") => Scalar::Text(binary(text)?),
        Some("null" | "bool" | "int" | "float") => untagged(text)?,
        // A tag of an application says nothing that JSON could hold.
        Some(_) => Scalar::Text(text.to_owned()),
    };
    let fits = match (tag, &resolved) {
        (Some("null"), Scalar::Null) | (Some("bool"), Scalar::Bool(_)) => true,
        (Some("int"), Scalar::Number(number)) => !number.is_f64(),
        (Some("float"), Scalar::Number(_)) => true,
        (Some("null" | "bool" | "int" | "float"), _) => false,
        _ => true,
    };
    match (tag, resolved) {
        (Some(tag), _) if !fits => Err(format!("a value that is not a !!{tag}")),
        (Some("float"), Scalar::Number(number)) => finite(number.as_f64().unwrap_or_default()),
        (_, resolved) => Ok(resolved),
    }
}

fn untagged(text: &str) -> Result<Scalar, String> {
    Ok(match text {
        "" | "~" | "null" | "Null" | "NULL" => Scalar::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            Scalar::Bool(true)
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            Scalar::Bool(false)
        }
        ".nan" | ".NaN" | ".NAN" | ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" | "-.inf"
        | "-.Inf" | "-.INF" => return Err("a number without a finite value: quote it if it is a text".into()),
        _ => match text.as_bytes()[0] {
            b'.' if is_float(text) => float(text)?,
            b'0'..=b'9' | b'+' | b'-' if !is_date(text) => number(text)?,
            _ => Scalar::Text(text.to_owned()),
        },
    })
}

fn number(text: &str) -> Result<Scalar, String> {
    let plain = text.replace('_', "");
    if let Some(number) = integer(&plain) {
        return Ok(Scalar::Number(number));
    }
    if is_float(&plain) { float(&plain) } else { Ok(Scalar::Text(text.to_owned())) }
}

/// Go's `ParseInt(text, 0, 64)`, then `ParseUint`.
fn integer(text: &str) -> Option<Number> {
    let (negative, signed, digits) = match text.as_bytes().first()? {
        b'-' => (true, true, &text[1..]),
        b'+' => (false, true, &text[1..]),
        _ => (false, false, text),
    };
    let lower = |prefix: &str| {
        digits.get(..2).filter(|start| start.eq_ignore_ascii_case(prefix)).map(|_| &digits[2..])
    };
    let (radix, digits) = if let Some(digits) = lower("0x") {
        (16, digits)
    } else if let Some(digits) = lower("0o") {
        (8, digits)
    } else if let Some(digits) = lower("0b") {
        (2, digits)
    } else if digits.len() > 1 && digits.starts_with('0') {
        (8, &digits[1..])
    } else {
        (10, digits)
    };
    // `from_str_radix` would take a second sign.
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return None;
    }
    let value = u64::from_str_radix(digits, radix).ok()?;
    if negative {
        let value = i64::try_from(-i128::from(value)).ok()?;
        return Some(value.into());
    }
    // `ParseUint` takes no sign.
    if signed && value > i64::MAX.unsigned_abs() { None } else { Some(value.into()) }
}

/// `^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$`
fn is_float(text: &str) -> bool {
    let text = text.strip_prefix(['-', '+']).unwrap_or(text);
    let (mantissa, exponent) = match text.find(['e', 'E']) {
        Some(at) => (&text[..at], Some(&text[at + 1..])),
        None => (text, None),
    };
    let all_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let mantissa_fits = match mantissa.split_once('.') {
        Some(("", fraction)) => !fraction.is_empty() && all_digits(fraction),
        Some((whole, fraction)) => all_digits(whole) && all_digits(fraction),
        None => !mantissa.is_empty() && all_digits(mantissa),
    };
    mantissa_fits
        && exponent.is_none_or(|exponent| {
            let digits = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
            !digits.is_empty() && all_digits(digits)
        })
}

fn float(text: &str) -> Result<Scalar, String> {
    // Go and Rust read the same digits to the same value; Rust wants none missing.
    finite(text.parse::<f64>().map_err(|_| "a number that cannot be read: quote it if it is a text")?)
}

/// A number that is whole is written without a fraction in JSON, as Go does.
fn finite(value: f64) -> Result<Scalar, String> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if value.fract() == 0.0 && value.abs() <= EXACT {
        #[allow(clippy::cast_possible_truncation, reason = "within the range that a double holds exactly")]
        return Ok(Scalar::Number((value as i64).into()));
    }
    match Number::from_f64(value) {
        Some(number) => Ok(Scalar::Number(number)),
        None => Err("a number without a finite value: quote it if it is a text".to_owned()),
    }
}

/// Whether a text is a date or time, which stays a text: `2006-1-2`, and the same with a time after `T`, `t`
/// or a space.
fn is_date(text: &str) -> bool {
    // A number has no `-` after four digits, so the beginning is enough to tell.
    let bytes = text.as_bytes();
    bytes.len() > 5 && bytes[..4].iter().all(u8::is_ascii_digit) && bytes[4] == b'-'
}

fn binary(text: &str) -> Result<String, String> {
    let compact: String = text.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    let bytes = BASE64_STANDARD.decode(compact).map_err(|_| "a !!binary that is not base64")?;
    String::from_utf8(bytes).map_err(|_| "a !!binary that is not UTF-8: JSON cannot hold it".to_owned())
}
