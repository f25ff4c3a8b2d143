//! Where requests enter: which addresses, and how they change.

use std::{collections::BTreeMap, pin::Pin, rc::Rc, time::Duration};

use futures_util::{StreamExt as _, future::join_all, stream};
use tokio::time::timeout;

use super::{
    entrance::{CONNECT_WITHIN, Entrance, dial, place},
    replica_list::{self, Listed},
};
use crate::{
    address::Address,
    api::{Client, Connector},
    duration::humane,
    failure::Failure,
};

/// Time limit for a list while requests are sent.
const LIST_WITHIN: Duration = Duration::from_secs(1);
/// How many replicas are asked for their lists.
const ASKED: usize = 8;
/// How many replicas are tried at once.
const TRIED: usize = 16;
/// Maximum number of replicas whose addresses are remembered.
const MAX_PLACES: usize = 1_000;

/// Why requests enter where they do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum How {
    /// `--through` says so.
    Given,
    /// These are the replicas that kas lists.
    Listed,
    /// The replicas cannot be reached directly: only `--address` is used.
    Address,
}

/// The addresses in use.
pub(super) struct Entrances {
    /// Why these.
    pub(super) how: How,
    /// The reason in words.
    pub(super) why: String,
    connector: Connector,
    /// The address whose port the replicas have.
    template: Address,
    list: Vec<Rc<Entrance>>,
    /// The addresses of replicas, by name.
    places: BTreeMap<String, String>,
}

/// What the replicas say now.
pub(super) struct News {
    lists: Vec<Listed>,
    /// Replicas where requests can enter from now on.
    joined: Vec<Entrance>,
}

impl Entrances {
    /// Decides where requests enter, and connects. Returns a connection as well.
    ///
    /// # Errors
    /// One of the addresses of the command line cannot be reached, or kas refuses the call.
    ///
    /// # Cancel safety
    /// Cancel safe: connections are closed.
    pub(super) async fn find(
        connector: &Connector,
        address: &Address,
        through: &[Address],
    ) -> Result<(Self, Client), Failure> {
        if !through.is_empty() {
            return Self::given(connector, through).await;
        }
        let (client, _driver) = connector.connect(address).await?;
        let replicas = replica_list::ask(&client).await?;
        let direct = match address {
            Address::Tcp { host, .. } => connector.for_replicas_of(host),
            Address::Unix(_) => connector.clone(),
        };
        let serving: Vec<&Listed> = replicas.iter().filter(|replica| replica.is_serving).collect();
        let tries = serving.iter().map(|replica| enter(&direct, address, replica));
        let found: Vec<_> = stream::iter(tries).buffered(TRIED).collect().await;
        let found: Result<Vec<Entrance>, String> = found.into_iter().collect();
        let (how, why, list) = match found {
            Ok(list) if !list.is_empty() => {
                (How::Listed, "the replicas that kas lists, at the port of --address".to_owned(), list)
            }
            Ok(_) => (How::Address, "kas lists no replica that is ready".to_owned(), Vec::new()),
            Err(why) => (How::Address, why, Vec::new()),
        };
        let list = if list.is_empty() {
            vec![Entrance::new(connector.clone(), address.clone(), None, Some(client.clone()))]
        } else {
            list
        };
        let mut entrances = Self {
            how,
            why,
            connector: direct,
            template: address.clone(),
            list: list.into_iter().map(Rc::new).collect(),
            places: BTreeMap::new(),
        };
        entrances.remember(&replicas);
        Ok((entrances, client))
    }

    async fn given(connector: &Connector, through: &[Address]) -> Result<(Self, Client), Failure> {
        let mut list = Vec::new();
        let mut first = None;
        for (index, address) in through.iter().enumerate() {
            if through[..index].contains(address) {
                continue;
            }
            let (client, _driver) = connector.connect(address).await?;
            first.get_or_insert_with(|| client.clone());
            list.push(Rc::new(Entrance::new(connector.clone(), address.clone(), None, Some(client))));
        }
        let client = first.ok_or(Failure::Usage("--through names no address"))?;
        let mut entrances = Self {
            how: How::Given,
            why: "the addresses of --through".to_owned(),
            connector: connector.clone(),
            template: through[0].clone(),
            list,
            places: BTreeMap::new(),
        };
        // Only for the addresses of replicas in the output.
        if let Ok(replicas) = replica_list::ask(&client).await {
            entrances.remember(&replicas);
        }
        Ok((entrances, client))
    }

    fn remember(&mut self, replicas: &[Listed]) {
        for replica in replicas {
            let is_known = self.places.contains_key(&replica.name);
            if !replica.address.is_empty() && (is_known || self.places.len() < MAX_PLACES) {
                self.places.insert(replica.name.clone(), replica.address.clone());
            }
        }
    }

    /// Returns how many there are.
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    /// Returns the URLs of the addresses.
    pub(super) fn urls(&self) -> Vec<Rc<str>> {
        self.list.iter().map(|entrance| Rc::clone(&entrance.url)).collect()
    }

    /// Returns one of the addresses: they take turns.
    pub(super) fn in_turn(&self, number: usize) -> Rc<Entrance> {
        Rc::clone(&self.list[number % self.list.len()])
    }

    /// Returns the addresses, without their schemes.
    pub(super) fn places(&self) -> Vec<&str> {
        self.list.iter().map(|entrance| entrance.place()).collect()
    }

    /// Returns the address of the private API of a replica; empty: it is not known.
    pub(super) fn address_of(&self, replica: &str) -> &str {
        self.places.get(replica).map_or("", String::as_str)
    }

    /// Returns where a request enters, and where it enters if it has to be sent once more: somewhere else, if
    /// there is another address. `agent` of `agents`, in turn: each agent is asked through each address.
    pub(super) fn pick(&self, number: u64, agent: usize, agents: usize) -> (Rc<Entrance>, Rc<Entrance>) {
        let at = place_of(number, agent, agents, self.list.len());
        let next = (at + 1) % self.list.len();
        (Rc::clone(&self.list[at]), Rc::clone(&self.list[next]))
    }

    /// Asks the replicas for their lists. `None`: no replica answers.
    ///
    /// # Cancel safety
    /// Cancel safe: nothing is changed.
    pub(super) fn refresh(&self) -> Pin<Box<dyn Future<Output = Option<News>>>> {
        let connector = self.connector.clone();
        let template = self.template.clone();
        let clients: Vec<Client> =
            self.list.iter().filter_map(|entrance| entrance.opened()).take(ASKED).collect();
        let known: Vec<String> = self.list.iter().filter_map(|entrance| entrance.replica.clone()).collect();
        let is_listed = self.how == How::Listed;
        Box::pin(async move {
            let answers = clients.iter().map(|client| timeout(LIST_WITHIN, replica_list::ask(client)));
            let answers: Vec<Vec<Listed>> = join_all(answers).await.into_iter().flatten().flatten().collect();
            if answers.is_empty() {
                return None;
            }
            let lists = replica_list::merge(answers);
            let mut joined = Vec::new();
            if is_listed {
                let new = lists.iter().filter(|replica| replica.is_serving && !replica.is_leaving);
                let new = new.filter(|replica| !known.contains(&replica.name));
                let tries: Vec<_> = new.map(|replica| enter(&connector, &template, replica)).collect();
                // One that cannot be reached yet is tried again next time.
                joined = stream::iter(tries)
                    .buffered(TRIED)
                    .filter_map(async |entered: Result<Entrance, String>| entered.ok())
                    .collect()
                    .await;
            }
            Some(News { lists, joined })
        })
    }

    /// Uses what the replicas say. Returns the changes in words.
    pub(super) fn apply(&mut self, news: News) -> Vec<String> {
        self.remember(&news.lists);
        if self.how != How::Listed {
            return Vec::new();
        }
        let mut changes = Vec::new();
        for entrance in news.joined {
            let name = entrance.replica.clone();
            // Two processes with the same address: the earlier one has ended.
            self.list.retain(|known| known.replica != name && known.url != entrance.url);
            changes.push(format!("requests now enter at {} as well", entrance.place()));
            self.list.push(Rc::new(entrance));
        }
        for replica in news.lists.iter().filter(|replica| replica.is_leaving) {
            let leaves = |entrance: &Rc<Entrance>| entrance.replica.as_ref() == Some(&replica.name);
            if self.list.len() > 1
                && let Some(index) = self.list.iter().position(leaves)
            {
                let entrance = self.list.remove(index);
                changes.push(format!("requests no longer enter at {}, which leaves", entrance.place()));
            }
        }
        changes
    }
}

/// Returns which of `places` a request takes. Agents and places take turns, and each agent gets each place.
fn place_of(number: u64, agent: usize, agents: usize, places: usize) -> usize {
    let round = number / u64::try_from(agents.max(1)).unwrap_or(u64::MAX);
    let places = u64::try_from(places.max(1)).unwrap_or(u64::MAX);
    let at = (round % places + u64::try_from(agent).unwrap_or(0) % places) % places;
    usize::try_from(at).unwrap_or(0)
}

/// Connects to a replica directly, and checks that it is that replica.
///
/// # Errors
/// It cannot be reached there: why, for a person.
async fn enter(connector: &Connector, template: &Address, replica: &Listed) -> Result<Entrance, String> {
    let Address::Tcp { tls, port, .. } = template else {
        return Err("--address is a socket of this host".to_owned());
    };
    let Some(host) = replica.host.clone() else {
        return Err(format!("the address of replica {} is not known", replica.name));
    };
    let address = Address::Tcp { tls: *tls, host, port: *port };
    let url = address.to_string();
    let failed = |why: &dyn std::fmt::Display| {
        format!("replica {} cannot be reached directly at {}: {why}", replica.name, place(&url))
    };
    let client = dial(connector.clone(), address.clone()).await.map_err(|why| failed(&why))?;
    let asked = timeout(CONNECT_WITHIN, replica_list::ask(&client)).await;
    let list = match asked {
        Ok(Ok(list)) => list,
        Ok(Err(failure)) => return Err(failed(&failure)),
        Err(_) => return Err(failed(&format!("no answer within {}", humane(CONNECT_WITHIN)))),
    };
    match list.first() {
        Some(own) if own.name == replica.name => {
            Ok(Entrance::new(connector.clone(), address, Some(replica.name.clone()), Some(client)))
        }
        _ => Err(failed(&"another process answers there")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_agent_is_asked_through_each_place() {
        for (agents, places) in [(1, 3), (3, 3), (2, 3), (3, 2), (6, 3), (1, 1), (5, 1)] {
            let mut pairs = BTreeSet::new();
            let mut shares = vec![0; places];
            for number in 0..(agents * places) as u64 {
                let agent = usize::try_from(number).unwrap() % agents;
                let place = place_of(number, agent, agents, places);
                pairs.insert((agent, place));
                shares[place] += 1;
            }
            assert_eq!(pairs.len(), agents * places, "{agents} agents, {places} places");
            assert!(shares.iter().all(|share| *share == agents), "{shares:?}");
        }
    }
}
