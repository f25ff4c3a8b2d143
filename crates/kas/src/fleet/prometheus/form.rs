//! The parameters of a question: of the query and, with `POST`, of the form in the body.

use std::borrow::Cow;

use form_urlencoded::{Serializer, parse};
use http::{Method, StatusCode, header};
use kubernetes_api::FleetQuestion;

use super::reply::Reply;

/// The most parameters.
const MOST: usize = 1_000;
/// A form up to this size goes on as a query, in bytes: then RBAC needs only `get`.
const LONGEST_QUERY: usize = 6 << 10;

/// Parameters in their order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Form(Vec<(String, String)>);

/// How parameters are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// As a query without `?`.
    Query(String),
    /// As the body of a `POST`.
    Body(String),
}

impl Form {
    /// Reads the parameters of a question.
    ///
    /// # Errors
    /// A reply with status 400 or 415.
    pub(super) fn read(question: &FleetQuestion) -> Result<Self, Reply> {
        let query = question.target.query().as_bytes();
        let body = if question.method == Method::POST && !question.body.is_empty() {
            let kind = question.headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
            if !kind.starts_with(b"application/x-www-form-urlencoded") {
                let text = "the body must be a form, application/x-www-form-urlencoded";
                return Err(Reply::error(StatusCode::UNSUPPORTED_MEDIA_TYPE, text));
            }
            &question.body[..]
        } else {
            &[]
        };
        Self::of(query, body).map_err(|text| Reply::error(StatusCode::BAD_REQUEST, &text))
    }

    pub(super) fn of(query: &[u8], body: &[u8]) -> Result<Self, String> {
        let pairs: Vec<(Cow<'_, str>, Cow<'_, str>)> =
            parse(query).chain(parse(body)).take(MOST + 1).collect();
        if pairs.len() > MOST {
            return Err(format!("there are more than {MOST} parameters"));
        }
        // Bytes that are no text were replaced, so a question with them would be another one.
        if pairs.iter().any(|(key, value)| key.contains('\u{fffd}') || value.contains('\u{fffd}')) {
            return Err("a parameter is not UTF-8".to_owned());
        }
        Ok(Self(pairs.into_iter().map(|(key, value)| (key.into_owned(), value.into_owned())).collect()))
    }

    /// Returns the first value of a parameter.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Returns all values of a parameter.
    pub(super) fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// Gives a parameter one value.
    pub(super) fn set(&mut self, key: &str, value: String) {
        self.0.retain(|(name, _)| name != key);
        self.add(key, value);
    }

    /// Changes all values of a parameter.
    pub(super) fn change<E>(
        &mut self,
        key: &str,
        mut change: impl FnMut(&str) -> Result<String, E>,
    ) -> Result<(), E> {
        for (_, value) in self.0.iter_mut().filter(|(name, _)| name == key) {
            *value = change(value)?;
        }
        Ok(())
    }

    /// Adds a parameter.
    pub(super) fn add(&mut self, key: &str, value: String) {
        self.0.push((key.to_owned(), value));
    }

    /// Returns the parameters as they are sent on.
    pub(super) fn sent(&self) -> Sent {
        let mut serializer = Serializer::new(String::new());
        serializer.extend_pairs(&self.0);
        let text = serializer.finish();
        if text.len() < LONGEST_QUERY { Sent::Query(text) } else { Sent::Body(text) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_and_body_are_one_form_in_order() {
        let form = Form::of(b"query=a%2Bb+c&x", b"match[]=%7Ba%3D%22b%22%7D&match[]=up").unwrap();
        assert_eq!((form.get("query"), form.get("x"), form.get("y")), (Some("a+b c"), Some(""), None));
        let expected = "query=a%2Bb+c&x=&match%5B%5D=%7Ba%3D%22b%22%7D&match%5B%5D=up";
        assert_eq!(form.sent(), Sent::Query(expected.to_owned()));
        let mut changed = form;
        changed.change("match[]", |value| Ok::<_, ()>(format!("{value}!"))).unwrap();
        changed.add("z", "1".to_owned());
        let Sent::Query(sent) = changed.sent() else { panic!("short") };
        assert!(sent.ends_with("match%5B%5D=up%21&z=1"), "{sent}");
    }

    #[test]
    fn long_forms_are_sent_as_a_body() {
        let long = format!("query={}", "a".repeat(LONGEST_QUERY));
        assert!(matches!(Form::of(b"", long.as_bytes()).unwrap().sent(), Sent::Body(_)));
        assert!(Form::of("a&".repeat(MOST + 1).as_bytes(), b"").is_err());
        assert!(Form::of(b"a=%ff", b"").is_err());
    }
}
