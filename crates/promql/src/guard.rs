//! Looks at an expression before it is parsed: it bounds what parsing costs, and refuses the few forms that
//! the parser reads otherwise than Prometheus does.

use crate::Refused;

/// The longest expression, in bytes.
const LONGEST: usize = 16 << 10;
/// Brackets and operators together. Each may be one level of the tree, and trees are walked by recursion.
const MOST_NESTING: usize = 250;
/// Regular expressions in one expression.
const MOST_REGEXES: usize = 64;
/// The length of a regular expression times its counted repetitions.
const MOST_REPEATED: usize = 20_000;
/// Digits of a number with a unit of time.
const MOST_DIGITS: usize = 9;

/// What came last, as far as the next token depends on it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    /// A duration must follow.
    Duration,
    /// The word `offset`, after which a sign may come.
    Offset,
    /// `=~` or `!~`.
    Regex,
    Other,
}

/// Checks an expression.
///
/// # Errors
/// [`Refused`].
pub(crate) fn check(text: &str) -> Result<(), Refused> {
    if text.len() > LONGEST {
        return Err(Refused::malformed(format!(
            "the expression has {} bytes; at most {LONGEST}",
            text.len()
        )));
    }
    Guard { text, rest: text, last: Last::Other, nesting: 0, regexes: 0, in_braces: false }.run()
}

struct Guard<'a> {
    text: &'a str,
    rest: &'a str,
    last: Last,
    nesting: usize,
    regexes: usize,
    in_braces: bool,
}

impl Guard<'_> {
    fn run(mut self) -> Result<(), Refused> {
        while let Some(next) = self.rest.chars().next() {
            match next {
                '"' | '\'' | '`' => self.string(next)?,
                '#' => {
                    let end = self.rest.find('\n').unwrap_or(self.rest.len());
                    self.skip(end);
                }
                c if c.is_ascii_alphanumeric() || c == '_' => self.word()?,
                c if c.is_ascii_whitespace() => self.skip(1),
                c if c.is_ascii_graphic() => self.sign(c)?,
                c => return Err(self.wrong(&format!("{c:?} outside of a string"))),
            }
        }
        Ok(())
    }

    fn skip(&mut self, bytes: usize) {
        self.rest = self.rest.get(bytes..).unwrap_or_default();
    }

    fn wrong(&self, what: &str) -> Refused {
        let at = self.text.len() - self.rest.len();
        Refused::malformed(format!("the expression has {what} at byte {at}"))
    }

    fn sign(&mut self, sign: char) -> Result<(), Refused> {
        if self.rest.starts_with("=~") || self.rest.starts_with("!~") {
            self.skip(2);
            self.last = Last::Regex;
            self.regexes += 1;
            if self.regexes > MOST_REGEXES {
                return Err(self.wrong(&format!("more than {MOST_REGEXES} regular expressions")));
            }
            return Ok(());
        }
        match sign {
            '{' => self.in_braces = true,
            '}' => self.in_braces = false,
            _ => {}
        }
        let nests = matches!(sign, '(' | '[' | '{')
            || !self.in_braces && matches!(sign, '+' | '-' | '*' | '/' | '%' | '^' | '=' | '!' | '<' | '>');
        self.nest(usize::from(nests))?;
        self.last = match (sign, self.last) {
            ('[' | ':', _) | ('+' | '-', Last::Offset) => Last::Duration,
            _ => Last::Other,
        };
        self.skip(1);
        Ok(())
    }

    fn nest(&mut self, levels: usize) -> Result<(), Refused> {
        self.nesting += levels;
        if self.nesting > MOST_NESTING {
            return Err(self.wrong(&format!("more than {MOST_NESTING} brackets and operators")));
        }
        Ok(())
    }

    fn word(&mut self) -> Result<(), Refused> {
        let is_number = self.rest.starts_with(|c: char| c.is_ascii_digit());
        // Names of metrics have colons; a colon after a number is that of a subquery.
        let is_inner =
            |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.') || c == ':' && !is_number;
        let end = self.rest.find(|c| !is_inner(c)).unwrap_or(self.rest.len());
        let before = self.last;
        if matches!(before, Last::Duration | Last::Offset)
            && self.rest.get(..end).is_none_or(|word| !is_duration(word))
        {
            return Err(self.wrong("no duration with a unit, such as 5m,"));
        }
        let word = self.rest.get(..end).unwrap_or_default();
        if is_number && has_long_duration(word) {
            return Err(self.wrong(&format!("a duration of more than {MOST_DIGITS} digits")));
        }
        let lower = word.to_ascii_lowercase();
        self.nest(usize::from(!self.in_braces && matches!(&*lower, "and" | "or" | "unless" | "atan2")))?;
        self.last = if lower == "offset" && !self.in_braces { Last::Offset } else { Last::Other };
        self.skip(end);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<(), Refused> {
        let is_regex = self.last == Last::Regex;
        let mut chars = self.rest.char_indices().skip(1);
        let end = loop {
            match chars.next() {
                None => return Err(self.wrong("a string without an end")),
                Some((at, c)) if c == quote => break at,
                Some((_, '\n')) if quote != '`' => return Err(self.wrong("a line break in a string")),
                Some((at, '\\')) if quote != '`' => {
                    let escape = self.rest.get(at + 1..).unwrap_or_default();
                    if !is_escape(escape, is_regex) {
                        return Err(self.wrong(
                            "an escape in a string that is not supported (write the character itself)",
                        ));
                    }
                    chars.next();
                }
                Some(_) => {}
            }
        };
        let inner = self.rest.get(1..end).unwrap_or_default();
        if is_regex && inner.len().saturating_mul(repetitions(inner)) > MOST_REPEATED {
            return Err(self.wrong("a regular expression that is too large"));
        }
        self.last = Last::Other;
        self.skip(end + 1);
        Ok(())
    }
}

/// Whether what follows a backslash is read alike by Prometheus and the parser. Escapes of bytes beyond ASCII
/// are not: Prometheus makes bytes of them, the parser characters. In regular expressions, numbers could hide
/// braces.
fn is_escape(text: &str, is_regex: bool) -> bool {
    let digits = |from: usize, to: usize, radix: u32| {
        let digits = text.get(from..to)?;
        // A sign is not a digit.
        digits.bytes().all(|byte| char::from(byte).is_digit(radix)).then_some(digits)
    };
    match text.bytes().next() {
        Some(b'a' | b'b' | b'f' | b'n' | b'r' | b't' | b'v' | b'\\' | b'\'' | b'"') => true,
        _ if is_regex => false,
        Some(b'x') => digits(1, 3, 16).is_some_and(|digits| digits < "8"),
        Some(b'u') => digits(1, 5, 16).is_some(),
        Some(b'U') => digits(1, 9, 16).is_some(),
        Some(b'0'..=b'7') => digits(0, 3, 8).is_some_and(|digits| digits < "2"),
        _ => false,
    }
}

/// Returns the product of all counted repetitions, such as 50 for `(a{5}){2,10}`.
fn repetitions(regex: &str) -> usize {
    regex.split('{').skip(1).fold(1_usize, |product, rest| {
        let inner = rest.split('}').next().unwrap_or_default();
        let most = inner
            .split(',')
            .filter(|count| !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit()))
            .map(|count| count.parse().unwrap_or(usize::MAX))
            .max();
        product.saturating_mul(most.unwrap_or(1).max(1))
    })
}

/// Whether a word is a duration as `5m` or `1h30m`.
fn is_duration(word: &str) -> bool {
    let mut rest = word;
    while !rest.is_empty() {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let unit = rest.get(digits..).unwrap_or_default();
        let unit_length = match unit.as_bytes() {
            [b'm', b's', ..] => 2,
            [b's' | b'm' | b'h' | b'd' | b'w' | b'y', ..] => 1,
            _ => return false,
        };
        if digits == 0 {
            return false;
        }
        rest = unit.get(unit_length..).unwrap_or_default();
    }
    !word.is_empty()
}

/// Whether a part of a duration has more digits than the parser reads. It would leave the part out.
fn has_long_duration(word: &str) -> bool {
    let mut digits = 0;
    for byte in word.bytes() {
        match byte {
            b'0'..=b'9' => digits += 1,
            b's' | b'm' | b'h' | b'd' | b'w' | b'y' if digits > MOST_DIGITS => return true,
            _ => digits = 0,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_expressions_pass() {
        for good in [
            "up",
            r#"sum by (a) (rate(x:y{a="b",c!~"d|e{2}"}[5m:1m] offset -1h30m)) / 2 # why: ä"#,
            r#"a{b="\"\\\n\x41\u00e4\101"}"#,
            "a{b=`\\d{`}",
            "foo[5m] @ 1609746000.5",
            "foo offset 1w",
            "5m",
            "{offset=\"1\"}",
            "a\n  and on (x)\tb",
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
    }

    #[test]
    fn what_is_too_much_or_read_otherwise_is_refused_with_its_place() {
        for (wrong, part) in [
            ("a".repeat(20_000), "bytes"),
            ("(".repeat(300), "brackets and operators at byte 250"),
            (format!("a{}", "+a".repeat(300)), "brackets and operators"),
            (format!("a{}", " or a".repeat(300)), "brackets and operators"),
            ("-".repeat(300), "brackets and operators"),
            (format!("{{{}}}", "a=~\"b\",".repeat(70)), "regular expressions"),
            (r#"a{b=~"((x{100}){100}){100}"}"#.to_owned(), "too large"),
            (r#"a{b=~"x\x7b9}"}"#.to_owned(), "escape"),
            (r#"a{b="\é"}"#.to_owned(), "escape"),
            (r#"a{b="\xe9"}"#.to_owned(), "escape"),
            (r#"a{b="\777"}"#.to_owned(), "escape"),
            (r#"a{b="\"#.to_owned(), "escape"),
            ("a{b=\"x".to_owned(), "without an end"),
            ("a{b=\"x\n\"}".to_owned(), "line break"),
            ("foo[inf]".to_owned(), "no duration"),
            ("foo[5m:nan]".to_owned(), "no duration"),
            ("foo[1e30]".to_owned(), "no duration"),
            ("foo offset - inf".to_owned(), "no duration"),
            ("foo offset 5".to_owned(), "no duration"),
            ("foo[99999999999s1m]".to_owned(), "duration of more than"),
            ("foo + ä".to_owned(), "outside of a string"),
            ("foo\0".to_owned(), "outside of a string"),
        ] {
            let refused = check(&wrong).unwrap_err();
            assert!(refused.text.contains(part), "{wrong}: {refused}");
        }
    }
}
