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

    fn has_claims(&self) -> bool {
        self.claims().next().is_some()
    }

    /// Whether both are the same text with one claim behind it, so that all their groups are of one kind.
    fn is_sibling(&self, other: &Self) -> bool {
        use TemplatePart::{Claim, Text};
        match (&self.parts[..], &other.parts[..]) {
            ([Text(one), Claim(_)], [Text(another), Claim(_)]) => one == another,
            ([Claim(_)], [Claim(_)]) => true,
            _ => false,
        }
    }

    /// Whether both can give the same text, of which each would mean something else. No value has a `:`,
    /// unless they are siblings.
    fn overlaps(&self, other: &Self) -> bool {
        if self.parts == other.parts || self.is_sibling(other) {
            return false;
        }
        let (own, others) = (self.segments(), other.segments());
        own.len() == others.len() && own.iter().zip(&others).all(|(one, another)| one.overlaps(another))
    }

    /// Splits it at each `:`.
    fn segments(&self) -> Vec<Segment> {
        let (mut segments, mut last) = (Vec::new(), Segment::default());
        for part in &self.parts {
            match part {
                TemplatePart::Claim(_) => last.end = Some(String::new()),
                TemplatePart::Text(text) => {
                    for (n, piece) in text.split(':').enumerate() {
                        if n > 0 {
                            segments.push(std::mem::take(&mut last));
                        }
                        last.end.as_mut().unwrap_or(&mut last.begin).push_str(piece);
                    }
                }
            }
        }
        segments.push(last);
        segments
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

/// Forbids `:` in the values of group templates, unless it can mean nothing else: there is only one, or all
/// are the same text with one claim behind it, as `corp:{groups}` and `corp:{roles}`. With `corp:{groups}`
/// and `corp:team:{team}`, a group `team:x` would be taken for the team `x`.
///
/// Templates without a claim do not count: everybody of the issuer has their groups.
pub(super) fn forbid_colons(templates: &mut [NameTemplate]) {
    let with_claims: Vec<_> = templates.iter().filter(|template| template.has_claims()).collect();
    let is_clear = match with_claims[..] {
        [] | [_] => true,
        [first, ..] => with_claims.iter().all(|template| first.is_sibling(template)),
    };
    if !is_clear {
        templates.iter_mut().for_each(|template| template.allows_colon = false);
    }
}

/// Returns the indices of the first two group templates that could give the same group although they mean
/// different ones. [`forbid_colons`] has been called for them.
pub(super) fn ambiguous(templates: &[NameTemplate]) -> Option<(usize, usize)> {
    let with_claims = || templates.iter().enumerate().filter(|(_, template)| template.has_claims());
    with_claims().find_map(|(n, template)| {
        let (earlier, _) =
            with_claims().take_while(|(m, _)| *m < n).find(|(_, one)| one.overlaps(template))?;
        Some((earlier, n))
    })
}

/// What is between two `:` of a template. It has at most one claim, because between two claims is a `:`.
#[derive(Debug, Default)]
struct Segment {
    begin: String,
    /// What follows the claim; `None`: there is no claim, and `begin` is everything.
    end: Option<String>,
}

impl Segment {
    /// Whether a value without `:` can make both the same text. No value is empty.
    fn overlaps(&self, other: &Self) -> bool {
        match (&self.end, &other.end) {
            (None, None) => self.begin == other.begin,
            (None, Some(end)) => other.can_be(&self.begin, end),
            (Some(end), None) => self.can_be(&other.begin, end),
            (Some(end), Some(other_end)) => {
                let (begin, other_begin) = (&*self.begin, &*other.begin);
                (begin.starts_with(other_begin) || other_begin.starts_with(begin))
                    && (end.ends_with(other_end.as_str()) || other_end.ends_with(end.as_str()))
            }
        }
    }

    /// Whether it can be this text. `end` is what follows its claim.
    fn can_be(&self, text: &str, end: &str) -> bool {
        let rest = text.strip_prefix(self.begin.as_str()).and_then(|rest| rest.strip_suffix(end));
        rest.is_some_and(|value| !value.is_empty())
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
        for (templates, allowed) in [
            (&["corp:{groups}", "corp:{roles}"][..], true),
            (&["corp:{groups}", "corp:all"], true),
            (&["corp:{groups}-x"], true),
            (&["corp:{groups}", "corp:team:{team}"], false),
            (&["corp:{groups}", "corp:{roles}-x"], false),
            (&["gh:{repository}:{ref}", "gh:{environment}"], false),
            (&["corp:{groups}", "corp:{team}:admins"], false),
        ] {
            let mut found: Vec<_> = templates.iter().map(|text| template(text)).collect();
            forbid_colons(&mut found);
            let of_one = found.iter().filter(|template| template.claims().count() == 1);
            assert!(of_one.clone().all(|template| template.allows_colon() == allowed), "{templates:?}");
            assert!(of_one.count() > 0);
        }
    }

    #[test]
    fn templates_that_can_give_the_same_group_are_ambiguous() {
        for (templates, expected) in [
            (&["gh:{environment}", "gh:repo-{repository}"][..], Some((0, 1))),
            (&["corp:{a}:x", "corp:b:{c}"], Some((0, 1))),
            (&["gl:ci", "gl:ref:{ref}", "gl:{a}:{b}"], Some((1, 2))),
            (&["gl:{a}-x", "gl:y-{b}"], Some((0, 1))),
            (&["gl:{a}:x:{b}", "gl:{c}:y:{d}"], None),
            (&["gl:{a}-x", "gl:{b}-y"], None),
            (&["gl:x-{a}", "gl:y-{b}"], None),
            (&["gl:x{a}:1", "gl:x:{b}"], None),
            (&["gl:{groups}", "gl:{roles}", "gl:{groups}", "gl:x"], None),
            (&["gl:{a}", "gl:{a}:{b}", "gl:x:y:{c}"], None),
            (&["gl:{a}:{b}", "gl:{b}:{a}"], Some((0, 1))),
            (&["gl:{a}:{b}", "gl:{a}:{b}"], None),
        ] {
            let parsed: Vec<_> = templates.iter().map(|text| template(text)).collect();
            assert_eq!(ambiguous(&parsed), expected, "{templates:?}");
        }
    }
}
