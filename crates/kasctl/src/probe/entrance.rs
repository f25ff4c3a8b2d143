//! An address where requests enter kas, and the connection to it.

use std::{cell::RefCell, rc::Rc, time::Duration};

use futures_util::{
    FutureExt as _,
    future::{LocalBoxFuture, Shared},
};

use crate::{
    address::Address,
    api::{Client, Connector},
    duration::humane,
    failure::Failure,
};

/// Time limit for a connection. A client of a balancer would hardly wait longer.
pub(super) const CONNECT_WITHIN: Duration = Duration::from_secs(2);

/// Why there is no connection.
type NotConnected = Rc<str>;
type Opening = Shared<LocalBoxFuture<'static, Result<Client, NotConnected>>>;

/// A connection, numbered so that a lost one is not mistaken for its successor.
#[derive(Clone)]
pub(super) struct Numbered {
    pub(super) client: Client,
    number: u64,
}

enum Connection {
    Closed,
    /// Every request that needs it waits for the same attempt.
    Opening(Opening),
    Open(Box<Client>),
}

/// Where requests enter. It is connected when a request needs it, once for all requests.
pub(super) struct Entrance {
    connector: Connector,
    address: Address,
    /// Its address as a URL.
    pub(super) url: Rc<str>,
    /// The name of the replica there, if kas listed it.
    pub(super) replica: Option<String>,
    state: RefCell<State>,
}

struct State {
    connection: Connection,
    number: u64,
}

impl Entrance {
    /// Describes an entrance. `client`: a connection to it, if there is one.
    pub(super) fn new(
        connector: Connector,
        address: Address,
        replica: Option<String>,
        client: Option<Client>,
    ) -> Self {
        let connection = client.map_or(Connection::Closed, |client| Connection::Open(Box::new(client)));
        let url = address.to_string().into();
        Self { connector, address, url, replica, state: RefCell::new(State { connection, number: 0 }) }
    }

    /// Returns the address without its scheme.
    pub(super) fn place(&self) -> &str {
        place(&self.url)
    }

    /// Returns the connection, if it is open.
    pub(super) fn opened(&self) -> Option<Client> {
        match &self.state.borrow().connection {
            Connection::Open(client) if !client.is_closed() => Some(Client::clone(client)),
            _ => None,
        }
    }

    /// Returns the connection, and opens one if there is none. Nothing was sent if there is none.
    ///
    /// # Errors
    /// It cannot be opened within [`CONNECT_WITHIN`].
    ///
    /// # Cancel safety
    /// Cancel safe: another request continues to open it.
    pub(super) async fn client(&self) -> Result<Numbered, NotConnected> {
        let (opening, number) = {
            let mut state = self.state.borrow_mut();
            let opening = match &state.connection {
                Connection::Open(client) if !client.is_closed() => {
                    return Ok(Numbered { client: Client::clone(client), number: state.number });
                }
                Connection::Opening(opening) => opening.clone(),
                Connection::Open(_) | Connection::Closed => {
                    let opening = dial(self.connector.clone(), self.address.clone()).boxed_local().shared();
                    state.connection = Connection::Opening(opening.clone());
                    state.number += 1;
                    opening
                }
            };
            (opening, state.number)
        };
        let opened = opening.await;
        let mut state = self.state.borrow_mut();
        // The first request that sees the end of the attempt records it.
        if state.number == number && matches!(state.connection, Connection::Opening(_)) {
            state.connection = match &opened {
                Ok(client) => Connection::Open(Box::new(client.clone())),
                Err(_) => Connection::Closed,
            };
        }
        opened.map(|client| Numbered { client, number })
    }

    /// Gives up a connection that does not answer: the next request opens another one.
    pub(super) fn give_up(&self, connection: &Numbered) {
        let mut state = self.state.borrow_mut();
        if state.number == connection.number {
            state.connection = Connection::Closed;
        }
    }
}

/// Returns a URL without its scheme.
pub(super) fn place(url: &str) -> &str {
    url.split_once("://").map_or(url, |(_, place)| place)
}

/// Connects to an address.
pub(super) async fn dial(connector: Connector, address: Address) -> Result<Client, NotConnected> {
    match tokio::time::timeout(CONNECT_WITHIN, connector.connect(&address)).await {
        Ok(Ok((client, _driver))) => Ok(client),
        Ok(Err(Failure::Connect { cause, .. })) => Err(cause.to_string().into()),
        Ok(Err(failure)) => Err(failure.to_string().into()),
        Err(_) => Err(format!("no connection within {}", humane(CONNECT_WITHIN)).into()),
    }
}
