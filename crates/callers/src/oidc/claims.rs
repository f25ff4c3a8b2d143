//! Judges the claims of a token, and makes a name and groups of them.

use std::time::Duration;

use ids::check_identity_value;
use kas_config::{NameTemplate, Oidc, TemplatePart};
use serde_json::Value;

use super::token::Claims;
use crate::Fault;

/// The most difference between the clocks of the issuer and kas, in seconds.
const LEEWAY: f64 = 30.0;
/// The most groups of a caller.
const MOST_GROUPS: usize = 64;
/// The longest time that a judgement is used, in seconds.
const LONGEST: f64 = 60.0;

/// What an issuer calls a caller.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Names {
    pub(super) name: String,
    pub(super) groups: Vec<String>,
}

/// Checks for how long, and for whom, a token is. `now` is in seconds since 1970. Returns how long that is
/// so, at most a minute. The token may not have been verified yet, so no fault is one with status 403.
pub(super) fn check_use(claims: &Claims, issuer: &Oidc, now: f64) -> Result<Duration, Fault> {
    let seconds = |claim: &Value| claim.as_f64().filter(|seconds| seconds.is_finite());
    let end = claims.get("exp").ok_or(Fault::NoExpiry)?;
    let left = seconds(end).ok_or(Fault::NoExpiry)? + LEEWAY - now;
    if left <= 0.0 {
        return Err(Fault::Expired);
    }
    if let Some(begin) = claims.get("nbf")
        && seconds(begin).is_none_or(|begin| begin > now + LEEWAY)
    {
        return Err(Fault::NotYet);
    }
    let is_ours = |audience: &Value| {
        audience.as_str().is_some_and(|audience| issuer.audiences.iter().any(|ours| ours == audience))
    };
    let is_for_us = match claims.get("aud") {
        Some(Value::Array(audiences)) => audiences.iter().any(is_ours),
        Some(audience) => is_ours(audience),
        None => false,
    };
    if !is_for_us {
        return Err(Fault::Audience);
    }
    Ok(Duration::from_secs_f64(left.min(LONGEST)))
}

/// Returns what the issuer calls the caller. The token has been verified.
pub(super) fn names(claims: &Claims, issuer: &Oidc) -> Result<Names, Fault> {
    let templates = || std::iter::once(&issuer.username).chain(&issuer.groups);
    let uses_email = templates().flat_map(NameTemplate::claims).any(|claim| claim == "email")
        || issuer.require.iter().any(|required| required.claim == "email");
    let is_verified = match claims.get("email_verified") {
        Some(Value::Bool(is_verified)) => *is_verified,
        // As some issuers write it.
        Some(Value::String(is_verified)) => is_verified == "true",
        _ => false,
    };
    // Without an address, there is nothing to verify.
    if uses_email && claims.contains_key("email") && !is_verified {
        return Err(Fault::Email);
    }
    for required in &issuer.require {
        let is_met = |value: &Value| match value {
            Value::Bool(value) => required.any_of.iter().any(|one| one.matches(&value.to_string())),
            value => text(value).is_some_and(|value| required.any_of.iter().any(|one| one.matches(&value))),
        };
        let is_met = match claims.get(&required.claim) {
            Some(Value::Array(values)) => values.iter().any(is_met),
            Some(value) => is_met(value),
            None => false,
        };
        if !is_met {
            return Err(Fault::Required);
        }
    }
    let name = filled(&issuer.username, |claim| match claims.get(claim) {
        Some(value) => text(value).map(Some).ok_or(Fault::Username),
        None => Err(Fault::Username),
    })?;
    let name = name.ok_or(Fault::Username)?;
    let mut groups: Vec<String> = Vec::new();
    for template in &issuer.groups {
        for group in groups_of(template, claims)? {
            if !groups.contains(&group) {
                if groups.len() >= MOST_GROUPS {
                    return Err(Fault::TooManyGroups);
                }
                groups.push(group);
            }
        }
    }
    Ok(Names { name, groups })
}

/// Returns the groups that a template gives: several if its only claim is a list, none if a claim is missing.
fn groups_of(template: &NameTemplate, claims: &Claims) -> Result<Vec<String>, Fault> {
    let mut named = template.claims();
    if let (Some(claim), None) = (named.next(), named.next())
        && let Some(Value::Array(values)) = claims.get(claim)
    {
        // More than that are refused anyway, unless they repeat each other.
        let values = values.iter().map(|value| {
            let value = text(value).ok_or(Fault::Groups)?;
            filled(template, |_| Ok(Some(value.clone())))
        });
        return values.filter_map(Result::transpose).collect();
    }
    let group = filled(template, |claim| match claims.get(claim) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => text(value).map(Some).ok_or(Fault::Groups),
    })?;
    Ok(group.into_iter().collect())
}

/// Fills in the claims of a template; `None`: one is missing.
fn filled(
    template: &NameTemplate,
    value_of: impl Fn(&str) -> Result<Option<String>, Fault>,
) -> Result<Option<String>, Fault> {
    let mut name = String::new();
    for part in template.parts() {
        match part {
            TemplatePart::Text(text) => name.push_str(text),
            TemplatePart::Claim(claim) => {
                let Some(value) = value_of(claim)? else { return Ok(None) };
                check_identity_value(&value).map_err(|_| Fault::Value)?;
                if value.contains(':') && !template.allows_colon() {
                    return Err(Fault::Colon);
                }
                name.push_str(&value);
            }
        }
    }
    Ok(Some(name))
}

/// Returns a text, or a whole number as text.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) if number.is_i64() || number.is_u64() => Some(number.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
