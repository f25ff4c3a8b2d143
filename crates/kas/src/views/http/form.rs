//! The parameters of a question.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use http::HeaderMap;
use kubernetes_api::FleetQuestion;
use proto::kas::api::v1::WatchViewRequest;

/// A question.
#[derive(Debug, PartialEq)]
pub(super) struct Form {
    pub(super) request: WatchViewRequest,
    /// Whether changes are wanted, too.
    pub(super) watch: bool,
}

const NAMES: &str = "agents, namespaces, labelSelector, filter, columns, maxRows, watch and resume";

impl Form {
    /// Reads a question. What a parameter may contain is judged later.
    ///
    /// # Errors
    /// Parameters that there are not, that are repeated, or that do not fit together.
    pub(super) fn read(question: &FleetQuestion) -> Result<Self, String> {
        let view = question.places.first().cloned().unwrap_or_default();
        let parameters = question.target.query_values();
        Self::of(view, parameters, &question.headers)
    }

    fn of(
        view: String,
        parameters: impl IntoIterator<Item = (String, Vec<String>)>,
        headers: &HeaderMap,
    ) -> Result<Self, String> {
        let mut form = Self { request: WatchViewRequest { view, ..Default::default() }, watch: false };
        let mut resume = None;
        for (name, mut values) in parameters {
            let request = &mut form.request;
            match name.as_str() {
                "namespaces" => {
                    request.namespaces = list(&values);
                    continue;
                }
                "columns" => {
                    request.columns = list(&values);
                    continue;
                }
                _ => {}
            }
            let value = values.pop().unwrap_or_default();
            if !values.is_empty() {
                return Err(format!("the parameter {:?} is there more than once", short(&name)));
            }
            match name.as_str() {
                "agents" => request.agents = value,
                "labelSelector" => request.label_selector = value,
                "filter" => request.filter = value,
                "maxRows" => {
                    let wrong = |_| {
                        format!("maxRows is {:?}: expected a number of rows, such as 1000", short(&value))
                    };
                    request.max_rows = value.parse().map_err(wrong)?;
                }
                "watch" => {
                    form.watch = match value.as_str() {
                        "1" | "true" => true,
                        "0" | "false" => false,
                        _ => return Err(format!("watch is {:?}: expected 1 or 0", short(&value))),
                    };
                }
                "resume" => resume = Some(value),
                _ => {
                    return Err(format!("there is no parameter {:?}; there are {NAMES}", short(&name)));
                }
            }
        }
        // A browser that comes back asks for the same address, and names the last event that it has.
        let last = headers.get("last-event-id").map(|value| String::from_utf8_lossy(value.as_bytes()).into());
        match last.filter(|_| form.watch).or(resume).filter(|resume: &String| !resume.is_empty()) {
            Some(_) if !form.watch => {
                return Err("resume is only for watch=1: without it, all rows are sent".to_owned());
            }
            Some(resume) => {
                // What cannot be read is no mistake of this client: all rows follow.
                let bytes = BASE64_URL_SAFE_NO_PAD.decode(&resume);
                form.request.resume = bytes.unwrap_or_else(|_| resume.into_bytes()).into();
            }
            None => {}
        }
        Ok(form)
    }
}

/// Reads lists, which may be repeated.
fn list(values: &[String]) -> Vec<String> {
    values
        .iter()
        .flat_map(|value| value.split(','))
        .filter(|item| !item.is_empty())
        .map(str::to_owned)
        .collect()
}

fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(query: &[(&str, &[&str])], last: Option<&'static str>) -> Result<Form, String> {
        let texts = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect();
        let mut headers = HeaderMap::new();
        if let Some(last) = last {
            headers.insert("last-event-id", http::HeaderValue::from_static(last));
        }
        let parameters = query.iter().map(|(name, values)| ((*name).to_owned(), texts(values)));
        Form::of("pods".to_owned(), parameters, &headers)
    }

    #[test]
    fn each_parameter_is_a_field() {
        let form = read(
            &[
                ("agents", &["name=prod-*"]),
                ("namespaces", &["a,b", "c"]),
                ("labelSelector", &["app=web,tier!=cache"]),
                ("filter", &["restarts>3"]),
                ("columns", &["Ready,Age"]),
                ("maxRows", &["10"]),
                ("watch", &["1"]),
                ("resume", &["AQI"]),
            ],
            None,
        );
        let request = WatchViewRequest {
            agents: "name=prod-*".into(),
            view: "pods".into(),
            namespaces: vec!["a".into(), "b".into(), "c".into()],
            label_selector: "app=web,tier!=cache".into(),
            filter: "restarts>3".into(),
            columns: vec!["Ready".into(), "Age".into()],
            resume: vec![1, 2].into(),
            max_rows: 10,
        };
        assert_eq!(form, Ok(Form { request, watch: true }));
    }

    #[test]
    fn the_last_event_counts_more_than_where_the_address_begins() {
        let resume = |last| {
            let form = read(&[("watch", &["true"]), ("resume", &["AQI"])], last).unwrap();
            form.request.resume.to_vec()
        };
        assert_eq!((resume(None), resume(Some("Aw"))), (vec![1, 2], vec![3]));
        // Nothing that this kas has given: it is passed on, so that the answer says that it begins anew.
        assert_eq!(resume(Some("!")), b"!");
        // Without changes there is no last event.
        let once = read(&[("agents", &["all"])], Some("Aw")).unwrap();
        assert!(once.request.resume.is_empty() && !once.watch);
    }

    #[test]
    fn wrong_parameters_are_named() {
        for (query, text) in [
            (("agent", &["7"][..]), "no parameter \"agent\"; there are agents, "),
            (("agents", &["all", "id=7"]), "\"agents\" is there more than once"),
            (("maxRows", &["-1"]), "maxRows is \"-1\""),
            (("watch", &["yes"]), "watch is \"yes\": expected 1 or 0"),
            (("resume", &["AQI"]), "resume is only for watch=1"),
        ] {
            let error = read(&[query], None).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }
}
