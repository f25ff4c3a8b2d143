//! Templates of the names and groups of an issuer.

use std::str::FromStr;

/// The longest template, in bytes.
const LONGEST: usize = 256;

/// A name with claims in braces, such as `corp:{email}`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NameTemplate {
    parts: Vec<TemplatePart>,
    allows_colon: bool,
}

/// A part of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplatePart {
    /// A text, which is not empty.
    Text(Box<str>),
    /// The value of the claim with this name.
    Claim(Box<str>),
}

/// A text that is not a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTemplate {
    /// Braces are not closed, nested, or empty.
    #[error("expected names of claims in braces, such as corp:{{email}}")]
    Braces,
    /// Two values could not be told apart.
    #[error("expected a text with `:` between two claims, such as gl:{{project_path}}:{{ref}}")]
    Separator,
    /// It is empty, too long or has a control character.
    #[error("expected 1 to 256 bytes without control characters")]
    Text,
}

impl NameTemplate {
    /// Returns its parts in their order.
    pub fn parts(&self) -> &[TemplatePart] {
        &self.parts
    }

    /// Returns the names of its claims.
    pub fn claims(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter_map(|part| match part {
            TemplatePart::Text(_) => None,
            TemplatePart::Claim(claim) => Some(&**claim),
        })
    }

    /// Whether the value of its claim may contain `:`. If not, such a value would make a name that has
    /// another meaning.
    pub fn allows_colon(&self) -> bool {
        self.allows_colon
    }

    /// Returns the text before the first claim.
    fn head(&self) -> &str {
        match self.parts.first() {
            Some(TemplatePart::Text(text)) => text,
            _ => "",
        }
    }
}

impl FromStr for NameTemplate {
    type Err = InvalidTemplate;

    fn from_str(text: &str) -> Result<Self, InvalidTemplate> {
        if text.is_empty() || text.len() > LONGEST || text.chars().any(char::is_control) {
            return Err(InvalidTemplate::Text);
        }
        let mut parts = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let (before, after) = match rest.split_once('{') {
                Some((before, after)) => (before, Some(after)),
                None => (rest, None),
            };
            if before.contains('}') {
                return Err(InvalidTemplate::Braces);
            }
            let is_separator = before.contains(':') || parts.is_empty() || after.is_none();
            if !before.is_empty() {
                parts.push(TemplatePart::Text(before.into()));
            }
            let Some(after) = after else { break };
            if !is_separator {
                return Err(InvalidTemplate::Separator);
            }
            let (claim, after) = after.split_once('}').ok_or(InvalidTemplate::Braces)?;
            if claim.is_empty() || claim.contains('{') || claim.trim() != claim {
                return Err(InvalidTemplate::Braces);
            }
            parts.push(TemplatePart::Claim(claim.into()));
            rest = after;
        }
        let mut template = Self { parts, allows_colon: false };
        template.allows_colon = template.claims().count() == 1;
        Ok(template)
    }
}

/// Forbids `:` in the values of templates with whose text another template begins: with `corp:{groups}` and
/// `corp:team:{team}`, a group `team:x` would be taken for the team `x`.
pub(super) fn forbid_colons(templates: &mut [NameTemplate]) {
    let heads: Vec<String> = templates.iter().map(|template| template.head().to_owned()).collect();
    for template in templates {
        let head = template.head();
        let is_begun = heads.iter().any(|other| other.len() > head.len() && other.starts_with(head));
        template.allows_colon &= !is_begun;
    }
}

/// Returns the longest text that ends with `:` and with which all templates begin; empty: there is none.
pub(super) fn prefix<'a>(mut templates: impl Iterator<Item = &'a NameTemplate>) -> &'a str {
    let Some(first) = templates.next() else { return "" };
    let mut common = first.head();
    for template in templates {
        let same =
            common.bytes().zip(template.head().bytes()).take_while(|(one, other)| one == other).count();
        // A `:` is one byte, so the text can be cut behind it.
        let end = common.as_bytes()[..same].iter().rposition(|byte| *byte == b':').map_or(0, |at| at + 1);
        common = &common[..end];
    }
    common.rfind(':').map_or("", |at| &common[..=at])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(text: &str) -> NameTemplate {
        text.parse().unwrap()
    }

    #[test]
    fn templates_are_texts_and_claims() {
        let text = |text: &str| TemplatePart::Text(text.into());
        let claim = |claim: &str| TemplatePart::Claim(claim.into());
        for (given, parts, allows_colon) in [
            ("corp:{email}", vec![text("corp:"), claim("email")], true),
            ("{a}", vec![claim("a")], true),
            ("{a}:{b}", vec![claim("a"), text(":"), claim("b")], false),
            (
                "x:{a}/y:{https://b.example/c d}z",
                vec![text("x:"), claim("a"), text("/y:"), claim("https://b.example/c d"), text("z")],
                false,
            ),
            ("ci:all", vec![text("ci:all")], false),
        ] {
            let found = template(given);
            assert_eq!((found.parts(), found.allows_colon()), (&*parts, allows_colon), "{given}");
        }
    }

    #[test]
    fn what_is_no_template_is_refused() {
        let long = "x".repeat(257);
        for (given, why) in [
            ("", InvalidTemplate::Text),
            (&*long, InvalidTemplate::Text),
            ("a\n{b}", InvalidTemplate::Text),
            ("a:{", InvalidTemplate::Braces),
            ("a:{}", InvalidTemplate::Braces),
            ("a:{b", InvalidTemplate::Braces),
            ("a:b}", InvalidTemplate::Braces),
            ("a:{{b}}", InvalidTemplate::Braces),
            ("a:{ b}", InvalidTemplate::Braces),
            ("a:{b}}", InvalidTemplate::Braces),
            ("a:{b}{c}", InvalidTemplate::Separator),
            ("a:{b}/{c}", InvalidTemplate::Separator),
        ] {
            assert_eq!(given.parse::<NameTemplate>(), Err(why), "{given}");
        }
    }

    #[test]
    fn the_prefix_is_what_all_begin_with() {
        for (templates, expected) in [
            (&["gl:{project_path}"][..], "gl:"),
            (&["gl:{project_path}", "gl:ref:{ref}"], "gl:"),
            (&["corp:eu:{email}", "corp:eu:{groups}"], "corp:eu:"),
            (&["corp:eu:{email}", "corp:us:{groups}"], "corp:"),
            (&["corp:{email}", "corq:{groups}"], ""),
            (&["{email}", "corp:{groups}"], ""),
            (&["corp-{email}"], ""),
            (&["cörp:{email}", "cörp:x"], "cörp:"),
            (&["corp:a{email}", "corp:ab"], "corp:"),
        ] {
            let templates: Vec<_> = templates.iter().map(|text| template(text)).collect();
            assert_eq!(prefix(templates.iter()), expected, "{templates:?}");
        }
    }

    #[test]
    fn values_with_a_colon_must_not_look_like_those_of_another_template() {
        let mut templates = ["corp:{groups}", "corp:{roles}", "corp:team:{team}"].map(template);
        forbid_colons(&mut templates);
        assert_eq!(templates.map(|template| template.allows_colon()), [false, false, true]);
        let mut alike = ["corp:{groups}", "corp:{roles}"].map(template);
        forbid_colons(&mut alike);
        assert_eq!(alike.map(|template| template.allows_colon()), [true, true]);
    }
}
