//! `kasctl pods`: lists the pods of the cluster of an agent, page by page.

use proto::kas::api::v1::{GetPodsRequest, Pod};
use serde::Serialize;

use crate::{
    api::{Client, UNARY_TIMEOUT},
    cli::{Format, PodsArgs},
    explain::CallKind,
    failure::{Exit, Failure},
    output::{Output, note},
    table::Table,
};

const TITLES: [&str; 2] = ["NAMESPACE", "NAME"];

/// Prints each page when it arrives. JSON is one document, so an incomplete list does not parse.
///
/// # Errors
/// A page cannot be read or written. The pages before it have been printed.
pub(crate) async fn run(
    client: Client,
    mut output: Output,
    args: PodsArgs,
    format: Format,
) -> Result<Exit, Failure> {
    let call = client.call(CallKind::Read(args.agent), Some(UNARY_TIMEOUT));
    let mut question = GetPodsRequest {
        agent_id: args.agent.get(),
        connection_id: args.connection.map(ids::ConnectionId::get).unwrap_or_default(),
        namespace: args.namespace.unwrap_or_default(),
        label_selector: args.selector.unwrap_or_default(),
        page_size: args.page_size,
        page_token: String::new(),
    };
    let mut printer = Printer { format, table: Table::new(TITLES), printed: 0 };
    let mut first = true;
    loop {
        let request = client.request(&call, question.clone())?;
        let page = client
            .within(&call, async {
                let answer = client.kas().get_pods(request).await;
                Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
            })
            .await?;
        let text = printer.page(&page.pods, first)?;
        output.write(text.as_bytes()).await?;
        first = false;
        if page.next_page_token.is_empty() {
            break;
        }
        if page.next_page_token == question.page_token {
            return Err(call.explain_broken("it returned the same page twice"));
        }
        question.page_token = page.next_page_token;
    }
    match format {
        Format::Json => output.write(b"\n]}\n").await?,
        Format::Table if printer.printed == 0 => note("no pods found"),
        Format::Table => {}
    }
    Ok(Exit::Ok)
}

struct Printer {
    format: Format,
    table: Table<2>,
    printed: usize,
}

#[derive(Serialize)]
struct PodJson<'a> {
    namespace: &'a str,
    name: &'a str,
}

impl Printer {
    fn page(&mut self, pods: &[Pod], first: bool) -> Result<String, Failure> {
        let mut text = String::new();
        match self.format {
            Format::Table => {
                let mut rows = Vec::with_capacity(pods.len() + 1);
                if first {
                    rows.push(TITLES.map(str::to_owned));
                }
                rows.extend(pods.iter().map(|pod| [pod.namespace.clone(), pod.name.clone()]));
                text = self.table.rows(&rows);
            }
            Format::Json => {
                if first {
                    text.push_str("{\"pods\":[");
                }
                for (i, pod) in pods.iter().enumerate() {
                    text.push_str(if self.printed + i == 0 { "\n" } else { ",\n" });
                    let pod = PodJson { namespace: &pod.namespace, name: &pod.name };
                    text.push_str(&serde_json::to_string(&pod).map_err(|e| Failure::Output(e.into()))?);
                }
            }
        }
        self.printed += pods.len();
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(namespace: &str, name: &str) -> Pod {
        Pod { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    #[test]
    fn pages_form_one_json_document() {
        let mut printer = Printer { format: Format::Json, table: Table::new(TITLES), printed: 0 };
        let mut text = printer.page(&[], true).unwrap();
        text += &printer.page(&[pod("a", "b\"")], false).unwrap();
        text += &printer.page(&[pod("c", "d")], false).unwrap();
        text += "\n]}\n";
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&text).unwrap(),
            serde_json::json!({"pods": [{"namespace": "a", "name": "b\""}, {"namespace": "c", "name": "d"}]})
        );
    }

    #[test]
    fn the_title_is_printed_once() {
        let mut printer = Printer { format: Format::Table, table: Table::new(TITLES), printed: 0 };
        assert_eq!(printer.page(&[pod("a", "b")], true).unwrap(), "NAMESPACE   NAME\na           b\n");
        assert_eq!(printer.page(&[pod("c", "d")], false).unwrap(), "c           d\n");
    }
}
