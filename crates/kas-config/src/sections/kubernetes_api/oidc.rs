//! Key `agent.kubernetes_api.oidc`.

mod claim_pattern;
mod template;

use std::path::PathBuf;

use http::Uri;
use ids::FILE_USER_PREFIX;
use settings::{show::shown_text, walk::Section};

pub use self::{
    claim_pattern::{ClaimPattern, InvalidClaimPattern},
    template::{InvalidTemplate, NameTemplate, TemplatePart},
};

/// Beginnings of names that belong to others.
const RESERVED: [&str; 2] = ["system:", "gitlab:"];
/// The longest issuer and the longest audience, in bytes.
const LONGEST: usize = 1024;

const ISSUER_RULE: &str =
    "an https URL without a query, as in the claim iss of the tokens, such as https://dex.example.com";

/// An issuer of OpenID Connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Oidc {
    /// The issuer, exactly as in the claim `iss`: a URL with https.
    pub issuer: String,
    /// The audiences, of which a token must have one. Not empty.
    pub audiences: Vec<String>,
    /// What all names and groups of this issuer begin with. Ends with `:`, and neither begins with that of
    /// another issuer or source, nor the other way round.
    pub prefix: String,
    /// The name of a caller. It has at least one claim.
    pub username: NameTemplate,
    /// Its groups.
    pub groups: Vec<NameTemplate>,
    /// What else its claims must be: all of these.
    pub require: Vec<RequiredClaim>,
    /// The CA certificates of the issuer, in addition to the system's.
    pub ca_file: Option<PathBuf>,
}

/// What a claim must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequiredClaim {
    /// The name of the claim.
    pub claim: String,
    /// What it may be: one of these. Not empty.
    pub any_of: Vec<ClaimPattern>,
}

/// Declares the list of issuers.
pub(super) fn read(s: &mut Section<'_, '_>) -> Vec<Oidc> {
    let doc = "Issuers of OpenID Connect, such as Dex, Keycloak, GitLab and GitHub Actions, whose tokens are credentials. \
               Each is {issuer: \"https://dex.example.com\", audiences: [kas], username: \"corp:{email}\", groups: \
               \"corp:{groups}\"}. username, groups (a text or a list of texts): templates with claims in braces; a \
               claim that is a list gives several groups. All begin with one prefix that ends with `:` and that no \
               other issuer has. Between two claims of a template is a text with `:`, and neither may contain one. \
               Two templates of groups must differ in a fixed text, so that no value gives a group of the other one; a \
               single claim behind the same text, as corp:{roles}, is permitted, and only such claims may contain `:`. \
               require: what else the claims must be, as {ref_protected: \"true\", namespace_path: \"acme/**\"}; `*` \
               matches anything but `/`, `**` anything; of a list, one must match. The claim email counts only with \
               email_verified. ca_file: PEM of the authority that signed the issuer's certificate, in addition to the \
               system's roots; reloaded on change. HTTPS_PROXY and NO_PROXY are respected.";
    let mut prefixes: Vec<(String, String)> = vec![(FILE_USER_PREFIX.to_owned(), "users.file".to_owned())];
    let mut issuers: Vec<(String, usize)> = Vec::new();
    s.items("oidc", doc, |s, i| {
        let issuer = issuer(s);
        if let Some((_, other)) = issuers.iter().find(|(known, _)| *known == issuer) {
            s.refuse("issuer", format!("an issuer that oidc[{other}] does not have"));
        }
        if !issuer.is_empty() {
            issuers.push((issuer.clone(), i));
        }
        let audiences = s.required_texts("audiences", &[], "the audiences of the tokens, such as [kas]", "");
        for (n, audience) in audiences.iter().enumerate() {
            if audience.len() > LONGEST || audience.chars().any(char::is_control) {
                let expected = "at most 1024 bytes without control characters";
                s.refuse_as(&format!("audiences[{n}]"), shown_text(audience), expected);
            }
        }
        let (prefix, username, groups) = names(s, &prefixes);
        if !prefix.is_empty() {
            prefixes.push((prefix.clone(), format!("oidc[{i}]")));
        }
        Oidc {
            issuer,
            audiences,
            prefix,
            username,
            groups,
            require: require(s),
            ca_file: s.path("ca_file", ""),
        }
    })
}

fn issuer(s: &mut Section<'_, '_>) -> String {
    const KEY: &str = "issuer";
    let text = s.required(KEY, "", ISSUER_RULE, "");
    if text.is_empty() {
        return text;
    }
    let is_good = text.len() <= LONGEST
        && !text.contains('#')
        && text.parse::<Uri>().is_ok_and(|uri| {
            uri.scheme_str() == Some("https")
                && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
                && uri.host().is_some_and(|host| !host.is_empty())
                && uri.query().is_none()
        });
    if is_good {
        return text;
    }
    // The URL may contain a password.
    if text.contains('@') {
        s.refuse_as(KEY, "something with an `@` (not shown)", format!("{ISSUER_RULE}, without a user"));
    } else {
        s.refuse(KEY, ISSUER_RULE);
    }
    String::new()
}

/// Reads the templates, and the prefix that they have in common. After a problem, the prefix may be empty.
fn names(s: &mut Section<'_, '_>, others: &[(String, String)]) -> (String, NameTemplate, Vec<NameTemplate>) {
    const EXPECTED: &str = "a template with a claim in braces, such as corp:{email}";
    let text = s.required("username", "", EXPECTED, "");
    let username = text.parse::<NameTemplate>().unwrap_or_else(|error| {
        if !text.is_empty() {
            s.refuse("username", error.to_string().trim_start_matches("expected ").to_owned());
        }
        NameTemplate::default()
    });
    if username.claims().next().is_none() && !s.is_refused("username") {
        s.refuse("username", EXPECTED);
    }
    let texts = s.text_or_texts("groups", "");
    let mut groups = Vec::with_capacity(texts.len());
    for (n, text) in texts.iter().enumerate() {
        match text.parse::<NameTemplate>() {
            Ok(template) => groups.push(template),
            Err(error) => {
                let expected = error.to_string().trim_start_matches("expected ").to_owned();
                s.refuse_as(&format!("groups[{n}]"), shown_text(text), expected);
            }
        }
    }
    template::forbid_colons(&mut groups);
    if s.is_refused("username") || s.is_refused("groups") {
        return (String::new(), username, groups);
    }
    if let Some((first, second)) = template::ambiguous(&groups) {
        let expected = format!(
            "a template that cannot give a group of groups[{first}], because the value of a claim could give the group \
             of another: other fixed texts between the same colons, such as corp:team:{{team}} and corp:role:{{role}}"
        );
        s.refuse_as(&format!("groups[{second}]"), shown_text(&texts[second]), expected);
    }
    let prefix = template::prefix(std::iter::once(&username).chain(&groups)).to_owned();
    if prefix.is_empty() {
        let expected = "templates of username and groups that all begin with one prefix that ends with `:`, such as corp:";
        s.refuse("username", expected);
    } else if let Some(reserved) = RESERVED.iter().find(|reserved| prefix.starts_with(**reserved)) {
        s.refuse("username", format!("another prefix than {reserved}, which is reserved"));
    } else if let Some((other, source)) =
        others.iter().find(|(other, _)| other.starts_with(&prefix) || prefix.starts_with(other))
    {
        let expected = format!(
            "a prefix that neither begins with that of {source} ({other}) nor the other way round, because a name \
             could be of either"
        );
        s.refuse_as("username", format!("the prefix {}", shown_text(&prefix)), expected);
    }
    (prefix, username, groups)
}

fn require(s: &mut Section<'_, '_>) -> Vec<RequiredClaim> {
    const KEY: &str = "require";
    let named = s.named_texts(KEY, "");
    let mut required = Vec::with_capacity(named.len());
    for (claim, texts) in named {
        let mut any_of = Vec::with_capacity(texts.len());
        for text in texts {
            match text.parse::<ClaimPattern>() {
                Ok(pattern) => any_of.push(pattern),
                Err(error) => {
                    let expected = error.to_string().trim_start_matches("expected ").to_owned();
                    let key = format!("{KEY}.{}", settings::show::plain_key(&claim));
                    s.refuse_as(&key, shown_text(&text), expected);
                }
            }
        }
        required.push(RequiredClaim { claim, any_of });
    }
    required
}
