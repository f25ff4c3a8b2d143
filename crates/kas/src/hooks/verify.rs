//! Whether a sender may send a hook: signatures and secrets, compared in constant time; and which of its
//! headers go on.

use std::time::Duration;

use agent_config::kas_yaml::hooks::Verify;
use aws_lc_rs::{digest, hmac};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use ids::TokenHash;
use mailbox::Header;

/// How far the time of a Standard Webhook may be from ours.
const LEEWAY: Duration = Duration::from_secs(300);
/// The shortest key in a query: 128 bits in Base64.
const SHORTEST_KEY: usize = 22;
/// The most signatures of a Standard Webhook that are compared: a sender has a few while it changes secrets.
const MOST_SIGNATURES: usize = 8;
/// The prefix of a secret of Standard Webhooks.
const STANDARD_SECRET: &str = "whsec_";
/// Headers that are kept, beside those that begin like this.
const KEPT: [&str; 4] = ["content-type", "user-agent", "idempotency-key", "authorization"];
const KEPT_PREFIXES: [&str; 5] = ["x-github-", "x-hub-", "x-gitlab-", "x-gitea-", "webhook-"];
/// Headers that tell a repetition by the sender, the surest first.
const REPETITIONS: [&str; 4] = ["webhook-id", "idempotency-key", "x-github-delivery", "x-gitlab-event-uuid"];
/// The header with GitLab's secret.
const GITLAB_TOKEN: &str = "x-gitlab-token";

/// A hook as its sender sent it. Names of headers are in lower case.
#[derive(Clone, Copy)]
pub(super) struct Sent<'a> {
    pub(super) headers: &'a [Header],
    pub(super) body: &'a [u8],
    /// `key` of the query; empty: none.
    pub(super) key: &'a str,
}

/// Whether a header of a request is needed for the verification or the receiver.
pub(super) fn is_kept(name: &str) -> bool {
    KEPT.contains(&name) || KEPT_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns the headers that go on to the receiver. The secret of GitLab goes on only to a receiver that
/// checks it itself.
pub(super) fn passed_on(verify: &Verify, headers: &[Header]) -> Vec<Header> {
    let is_target = matches!(verify, Verify::Target(_));
    let goes = |name: &str| match name {
        "authorization" | "idempotency-key" => false,
        GITLAB_TOKEN => is_target,
        name => is_kept(name),
    };
    headers.iter().filter(|(name, _)| goes(name)).cloned().collect()
}

impl<'a> Sent<'a> {
    /// Returns the value of a header that is there exactly once.
    fn one(&self, name: &str) -> Option<&'a [u8]> {
        let mut values = self.headers.iter().filter(|(known, _)| &**known == name);
        let (value, None) = (values.next(), values.next()) else { return None };
        value.map(|(_, value)| &value[..])
    }

    /// Whether the sender may send it. `secret` is that of the hook; `None`: there is none, and a hook that
    /// needs one is refused, after as much work. `wall` is the time since 1970-01-01 00:00 UTC.
    pub(super) fn is_verified(&self, verify: &Verify, secret: Option<&[u8]>, wall: Duration) -> bool {
        let is_known = secret.is_some() || matches!(verify, Verify::Target(_));
        let secret = secret.unwrap_or(b"none");
        let is_right = match verify {
            Verify::Gitlab(_) => self.one(GITLAB_TOKEN).is_some_and(|token| is_same(token, secret)),
            Verify::Bearer(_) => {
                let token = self.one("authorization").and_then(|value| {
                    let (scheme, token) = value.split_at_checked(7)?;
                    scheme.eq_ignore_ascii_case(b"bearer ").then_some(token.trim_ascii())
                });
                token.is_some_and(|token| is_same(token, secret))
            }
            Verify::Github(_) => self.is_github(secret),
            Verify::Standard(_) => self.is_standard(secret, wall),
            Verify::Target(hash) => {
                self.key.len() >= SHORTEST_KEY && TokenHash::of(self.key.as_bytes()) == *hash
            }
        };
        is_right && is_known
    }

    fn is_github(&self, secret: &[u8]) -> bool {
        let signature = self.one("x-hub-signature-256").and_then(|value| value.strip_prefix(b"sha256="));
        let signature = signature.and_then(hex);
        let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
        signature.is_some_and(|signature| hmac::verify(&key, self.body, &signature).is_ok())
    }

    /// As <https://www.standardwebhooks.com> says.
    fn is_standard(&self, secret: &[u8], wall: Duration) -> bool {
        let Ok(text) = std::str::from_utf8(secret) else { return false };
        let encoded = text.strip_prefix(STANDARD_SECRET).unwrap_or(text);
        let Ok(key) = BASE64_STANDARD.decode(encoded) else { return false };
        let (Some(id), Some(time), Some(signatures)) =
            (self.one("webhook-id"), self.one("webhook-timestamp"), self.one("webhook-signature"))
        else {
            return false;
        };
        let seconds = std::str::from_utf8(time).ok().and_then(|text| text.parse::<u64>().ok());
        let is_near = seconds.is_some_and(|seconds| wall.abs_diff(Duration::from_secs(seconds)) <= LEEWAY);
        let mut signed = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, &key));
        for part in [id, b".", time, b".", self.body] {
            signed.update(part);
        }
        let signed = signed.sign();
        let given = signatures.split(|byte| *byte == b' ').take(MOST_SIGNATURES);
        let given = given.filter_map(|one| BASE64_STANDARD.decode(one.strip_prefix(b"v1,")?).ok());
        // All are compared, so that the time does not tell which one was right.
        let is_signed = given.fold(false, |found, one| is_same(&one, signed.as_ref()) | found);
        is_near && is_signed
    }

    /// Returns a hash of what tells a repetition of this hook by its sender; `None`: there is nothing.
    pub(super) fn repetition(&self, hook: &str) -> Option<[u8; 32]> {
        let (name, value) =
            REPETITIONS.iter().find_map(|name| Some((*name, self.one(name).filter(|it| !it.is_empty())?)))?;
        let mut context = digest::Context::new(&digest::SHA256);
        for part in [hook.as_bytes(), b"\0", name.as_bytes(), b"\0", value] {
            context.update(part);
        }
        let mut hash = [0; 32];
        hash.copy_from_slice(context.finish().as_ref());
        Some(hash)
    }
}

/// Whether two secrets are the same. The time does not tell where they differ, nor how long ours is.
fn is_same(given: &[u8], ours: &[u8]) -> bool {
    TokenHash::of(given) == TokenHash::of(ours)
}

/// Decodes the digits of a SHA-256.
fn hex(digits: &[u8]) -> Option<[u8; 32]> {
    std::str::from_utf8(digits).ok().filter(|text| text.len() == 64)?;
    let mut bytes = [0; 32];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |at: usize| char::from(*pair.get(at)?).to_digit(16);
        *byte = u8::try_from(digit(0)? * 16 + digit(1)?).ok()?;
    }
    Some(bytes)
}

/// For fuzzing: every kind of verification of a hook whose headers and body are `bytes`, line by line. No
/// panic, and nothing is accepted without the secret, which is not in the bytes.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    let mut headers: Vec<Header> = Vec::new();
    let (head, body) = match bytes.windows(2).position(|pair| pair == b"\n\n") {
        Some(at) => (&bytes[..at], &bytes[at + 2..]),
        None => (bytes, &b""[..]),
    };
    for line in head.split(|byte| *byte == b'\n').take(100) {
        let (name, value) = line.split_at(line.iter().position(|byte| *byte == b':').unwrap_or(line.len()));
        let value = bytes::Bytes::copy_from_slice(value.get(1..).unwrap_or_default().trim_ascii());
        headers.push((String::from_utf8_lossy(name).to_ascii_lowercase().into(), value));
    }
    let key = String::from_utf8_lossy(body).into_owned();
    let sent = Sent { headers: &headers, body, key: &key };
    let secret = b"c2VjcmV0IHRoYXQgbm9ib2R5IGd1ZXNzZXMgYnkgY2hhbmNl";
    let name = || "a".to_owned();
    for verify in [
        Verify::Gitlab(name()),
        Verify::Bearer(name()),
        Verify::Github(name()),
        Verify::Standard(name()),
        Verify::Target(TokenHash::of(secret)),
    ] {
        let has_secret = bytes.windows(16).any(|part| part == &secret[..16]);
        assert!(has_secret || !sent.is_verified(&verify, Some(secret), Duration::ZERO), "{verify:?}");
        assert!(!sent.is_verified(&verify, None, Duration::ZERO) || has_secret);
        let passed = passed_on(&verify, &headers);
        assert!(passed.iter().all(|(name, _)| &**name != "authorization" && is_kept(name)));
    }
    let _ = sent.repetition("a");
    signed(body);
}

/// A body that its sender has signed is accepted, and neither another one nor another secret.
#[cfg(feature = "fuzzing")]
fn signed(body: &[u8]) {
    let secret = b"a secret of a test";
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    let hex: String = hmac::sign(&key, body).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let github: Header = ("x-hub-signature-256".into(), format!("sha256={hex}").into());
    let standard = hmac::sign(&key, &[b"1.0.", body].concat());
    let standard: [Header; 3] = [
        ("webhook-id".into(), bytes::Bytes::from_static(b"1")),
        ("webhook-timestamp".into(), bytes::Bytes::from_static(b"0")),
        ("webhook-signature".into(), format!("v1,{}", BASE64_STANDARD.encode(standard)).into()),
    ];
    let other = [body, b"."].concat();
    let encoded = BASE64_STANDARD.encode(secret);
    for (verify, secret, headers) in [
        (Verify::Github("a".to_owned()), &secret[..], &[github][..]),
        (Verify::Standard("a".to_owned()), encoded.as_bytes(), &standard[..]),
    ] {
        let of =
            |body, secret| Sent { headers, body, key: "" }.is_verified(&verify, Some(secret), Duration::ZERO);
        assert!(of(body, secret), "{verify:?}: what is signed is accepted");
        assert!(!of(&other, secret) && !of(body, b"bm90aGluZw=="), "{verify:?}");
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn headers(pairs: &[(&str, &str)]) -> Vec<Header> {
        pairs.iter().map(|(name, value)| ((*name).into(), Bytes::copy_from_slice(value.as_bytes()))).collect()
    }

    fn name() -> String {
        "push".to_owned()
    }

    const NOW: Duration = Duration::from_secs(1_614_265_330);

    fn is_verified(verify: &Verify, pairs: &[(&str, &str)], body: &str, key: &str) -> bool {
        let headers = headers(pairs);
        let sent = Sent { headers: &headers, body: body.as_bytes(), key };
        let secret: &[u8] = match verify {
            Verify::Standard(_) => b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            _ => b"It's a Secret to Everybody",
        };
        assert!(!sent.is_verified(verify, None, NOW) || matches!(verify, Verify::Target(_)));
        sent.is_verified(verify, Some(secret), NOW)
    }

    #[test]
    fn githubs_own_example_is_accepted() {
        // https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries
        let right = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
        let verify = Verify::Github(name());
        assert!(is_verified(&verify, &[("x-hub-signature-256", right)], "Hello, World!", ""));
        assert!(!is_verified(&verify, &[("x-hub-signature-256", right)], "Hello, World", ""));
        let header = "x-hub-signature-256";
        for wrong in
            ["", "sha256=", "sha1=757107ea", &right[7..], &right.replace('7', "8"), &format!("{right}0")]
        {
            assert!(!is_verified(&verify, &[(header, wrong)], "Hello, World!", ""), "{wrong}");
        }
        let twice = [(header, right), (header, right)];
        assert!(!is_verified(&verify, &twice, "Hello, World!", ""), "which one counts?");
        assert!(!is_verified(&verify, &[], "Hello, World!", ""));
    }

    #[test]
    fn the_example_of_standard_webhooks_is_accepted_for_five_minutes() {
        // The test vector of the reference libraries.
        let signed = [
            ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
            ("webhook-timestamp", "1614265330"),
            ("webhook-signature", "v1,AAAA v1a,x v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="),
        ];
        let verify = Verify::Standard(name());
        let body = "{\"test\": 2432232314}";
        assert!(is_verified(&verify, &signed, body, ""));
        assert!(!is_verified(&verify, &signed, "{\"test\": 2432232315}", ""));
        let headers = headers(&signed);
        let sent = Sent { headers: &headers, body: body.as_bytes(), key: "" };
        let at = |seconds: u64| {
            let secret = b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
            sent.is_verified(&verify, Some(secret), Duration::from_secs(seconds))
        };
        assert!(at(1_614_265_330 + 300) && at(1_614_265_330 - 300));
        assert!(!at(1_614_265_330 + 301) && !at(1_614_265_330 - 301));
        assert!(!sent.is_verified(&verify, Some(b"whsec_%%"), NOW));
        assert!(!is_verified(&verify, &signed[..2], body, ""));
    }

    #[test]
    fn tokens_and_keys_are_compared() {
        let secret = "It's a Secret to Everybody";
        let gitlab = Verify::Gitlab(name());
        assert!(is_verified(&gitlab, &[("x-gitlab-token", secret)], "", ""));
        assert!(!is_verified(&gitlab, &[("x-gitlab-token", &secret[1..])], "", ""));
        assert!(!is_verified(&gitlab, &[("x-gitlab-token", "none")], "", ""));
        let bearer = Verify::Bearer(name());
        assert!(is_verified(&bearer, &[("authorization", &format!("bearer {secret}"))], "", ""));
        assert!(!is_verified(&bearer, &[("authorization", secret)], "", ""));
        assert!(!is_verified(&bearer, &[("authorization", "Bearer ")], "", ""));
        let key = "0123456789abcdef0123456789abcdef";
        let target = Verify::Target(TokenHash::of(key.as_bytes()));
        assert!(is_verified(&target, &[], "", key));
        assert!(!is_verified(&target, &[], "", &key[1..]));
        let short = "0123456789abcdef";
        assert!(!is_verified(&Verify::Target(TokenHash::of(short.as_bytes())), &[], "", short));
    }

    #[test]
    fn secrets_do_not_go_on_and_repetitions_are_known() {
        let sent = headers(&[
            ("content-type", "application/json"),
            ("x-gitlab-token", "t"),
            ("x-gitlab-event", "Push Hook"),
            ("authorization", "Bearer t"),
            ("idempotency-key", "k"),
            ("x-forwarded-for", "1.2.3.4"),
            ("cookie", "c"),
        ]);
        let names = |verify: &Verify| {
            let passed = passed_on(verify, &sent);
            passed.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(&Verify::Gitlab(name())), ["content-type", "x-gitlab-event"]);
        let target = Verify::Target(TokenHash::of(b"x"));
        assert_eq!(names(&target), ["content-type", "x-gitlab-token", "x-gitlab-event"]);
        let of = |pairs: &[(&str, &str)], hook: &str| {
            let headers = headers(pairs);
            Sent { headers: &headers, body: b"", key: "" }.repetition(hook)
        };
        let github = of(&[("x-github-delivery", "1")], "a");
        assert!(github.is_some() && github == of(&[("x-github-delivery", "1"), ("x-other", "2")], "a"));
        assert_ne!(github, of(&[("x-github-delivery", "1")], "b"));
        assert_ne!(github, of(&[("x-github-delivery", "2")], "a"));
        assert_eq!(of(&[("x-github-delivery", "")], "a"), None);
        let both = of(&[("x-github-delivery", "1"), ("webhook-id", "1")], "a");
        assert_eq!(both, of(&[("webhook-id", "1")], "a"));
    }
}
