//! Arguments of `get`.

use clap::Args;

use super::catalog::CatalogArgs;
use crate::failure::Failure;

pub(super) const GET_HELP: &str = "\
Examples:
  kasctl get pods --agents all
  kasctl get pods --agents 'name=prod-*' -n shop -l app=web --watch
  kasctl get pods --agents id=7 --filter 'restarts>3,phase!=Running' --columns status,restarts,node
  kasctl get workloads --agents project=3
  kasctl get summary --agents all                 numbers of nodes, namespaces, pods and deployments
  kasctl get nodes --agents all -o json | jq -r '.rows[] | select(.cells.Status != \"Ready\").name'

Built-in views are nodes, pods, workloads, events and summary; views.files of kas may name more. Rows and columns \
are those of kubectl get. The views components and applications are those of kasctl components and kasctl apps. An agent that did not answer, or whose rows are not up to date, is named on standard \
error, and the exit code is 6.

With --watch, rows start with an event: present (there before), added, changed or removed.

JSON is stable: fields may be added, but are not changed or removed.
  {\"columns\": [{\"name\", \"type\"}], \"rows\": [{\"agent_id\", \"agent\", \"resource\", \"namespace\", \"name\", \"uid\",
   \"time\", \"cells\": {\"Title\": \"text\"}}], \"unanswered\": [{\"id\", \"name\", \"reason\"}],
   \"replicas\": [{\"address\":{\"ip\",\"port\"}, \"reason\"}], \"truncated\"}
With --watch, one line for each event: columns, upserted {\"row\"}, removed {\"row\"}, reset (all rows before it count no \
more), agent {\"id\", \"name\", \"state\", \"reason\"} and synced (everything was sent).";

/// Arguments of `get`.
#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    /// Name of the view, such as pods
    #[arg(value_name = "VIEW")]
    pub(crate) view: String,
    /// Which agents: all, or id=7|9, project=3, name=prod-*, env=prod, joined by commas
    #[arg(long, value_name = "SELECTOR")]
    pub(crate) agents: String,
    /// Only this namespace; may be repeated [default: all]
    #[arg(short, long = "namespace", value_name = "NAMESPACE")]
    pub(crate) namespaces: Vec<String>,
    /// Only objects with these labels, in the syntax of kubectl
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    pub(crate) selector: Option<String>,
    /// Only rows with these cells, such as restarts>3,phase!=Running
    #[arg(long, value_name = "FILTER")]
    pub(crate) filter: Option<String>,
    /// Titles of columns, separated by commas; * for all [default: those of the view]
    #[arg(long, value_name = "TITLES", value_delimiter = ',')]
    pub(crate) columns: Vec<String>,
    /// The most rows [default: 100000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) max_rows: Option<u32>,
    /// Keep printing changes until Ctrl-C
    #[arg(short, long)]
    pub(crate) watch: bool,
}

/// A view whose rows are no objects.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Catalog {
    Components,
    Applications,
}

impl GetArgs {
    /// Returns what `components` or `apps` gets instead, if the view is one of these; `None`: it is not.
    ///
    /// # Errors
    /// If there are arguments that are only for objects.
    pub(crate) fn catalog(&self) -> Result<Option<(Catalog, CatalogArgs)>, Failure> {
        let catalog = match &*self.view {
            "components" => Catalog::Components,
            "applications" => Catalog::Applications,
            _ => return Ok(None),
        };
        if self.watch
            || self.selector.is_some()
            || self.filter.is_some()
            || self.max_rows.is_some()
            || !self.columns.is_empty()
        {
            return Err(Failure::Usage(
                "components and applications are read when they are asked for: only --agents and --namespace are allowed",
            ));
        }
        let args = CatalogArgs { agents: self.agents.clone(), namespaces: self.namespaces.clone() };
        Ok(Some((catalog, args)))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    fn get(line: &str) -> GetArgs {
        let Command::Get(args) = Cli::try_parse_from(line.split(' ')).unwrap().command else {
            panic!("{line}")
        };
        args
    }

    #[test]
    fn components_and_applications_are_views_that_are_not_watched() {
        let (catalog, args) =
            get("kasctl get applications --agents env=prod -n shop").catalog().unwrap().unwrap();
        assert_eq!((catalog, &*args.agents), (Catalog::Applications, "env=prod"));
        assert_eq!(args.namespaces, ["shop"]);
        let (catalog, _) = get("kasctl get components --agents all").catalog().unwrap().unwrap();
        assert_eq!(catalog, Catalog::Components);
        assert!(get("kasctl get pods --agents all --watch").catalog().unwrap().is_none());
        for more in ["--watch", "-l app=web", "--filter a=b", "--columns a", "--max-rows 5"] {
            assert!(get(&format!("kasctl get components --agents all {more}")).catalog().is_err(), "{more}");
        }
    }
}
