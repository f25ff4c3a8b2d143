//! [`Publisher`]: sends messages to other programs through Redis.

use redis::{Cmd, Value};

use crate::connect::{Connect, Dialer, Error, Link};

/// Sends messages through one connection, which is dialled when one is sent.
#[derive(Debug)]
pub struct Publisher {
    dialer: Dialer,
    link: Link,
}

impl Publisher {
    /// Returns one that is not connected yet.
    ///
    /// # Errors
    /// If the settings are invalid regardless of Redis.
    pub fn new(connect: Connect) -> Result<Self, Error> {
        Ok(Self { dialer: Dialer::new(connect)?, link: Link::new() })
    }

    /// Dials by these settings from now on. An open connection stays.
    ///
    /// # Errors
    /// If they are invalid regardless of Redis. Then nothing changes.
    pub fn reconfigure(&self, connect: Connect) -> Result<(), Error> {
        self.dialer.reconfigure(connect)
    }

    /// Publishes messages, each on its channel. Returns for each whether Redis took it; whether somebody
    /// listens is not known.
    ///
    /// # Errors
    /// See [`Error`]. Some may have been published.
    ///
    /// # Cancel safety
    /// If it is dropped, some may have been published.
    pub async fn publish<'m>(
        &self,
        messages: impl IntoIterator<Item = (String, &'m [u8])>,
    ) -> Result<Vec<Result<(), String>>, Error> {
        let commands = messages.into_iter().map(|(channel, message)| {
            let mut command = Cmd::new();
            command.arg("PUBLISH").arg(channel).arg(message);
            command
        });
        self.each(commands.collect()).await
    }

    /// Adds entries to a stream, each with its fields, and cuts it to about `most` entries. Returns for each
    /// whether Redis took it.
    ///
    /// # Errors
    /// See [`Error`]. Some may have been added.
    ///
    /// # Cancel safety
    /// If it is dropped, some may have been added.
    pub async fn add<'m>(
        &self,
        stream: &str,
        most: u32,
        entries: impl IntoIterator<Item = Vec<(&'static str, &'m [u8])>>,
    ) -> Result<Vec<Result<(), String>>, Error> {
        let commands = entries.into_iter().map(|fields| {
            let mut command = Cmd::new();
            command.arg("XADD").arg(stream).arg("MAXLEN").arg("~").arg(most).arg("*");
            for (name, value) in fields {
                command.arg(name).arg(value);
            }
            command
        });
        self.each(commands.collect()).await
    }

    async fn each(&self, commands: Vec<Cmd>) -> Result<Vec<Result<(), String>>, Error> {
        let values = self.link.each(&self.dialer, commands).await?;
        let taken = |value: Value| match value {
            Value::ServerError(error) => Err(error.to_string()),
            _ => Ok(()),
        };
        Ok(values.into_iter().map(taken).collect())
    }
}

#[cfg(test)]
mod tests {
    use testkit::redis::Redis;

    use super::*;
    use crate::{Address, Target};

    #[tokio::test]
    async fn messages_reach_a_stream_and_errors_are_those_of_one_message() {
        let redis = Redis::run().await.unwrap();
        let at = redis.address();
        let connect = Connect::to(Target::Server(Address::Tcp(at.ip().to_string(), at.port())));
        let publisher = Publisher::new(connect).unwrap();
        redis.ask("SET wrong 1").await.unwrap();
        let entries = [vec![("id", &b"1"[..])], vec![("id", &b"2"[..])]];
        assert_eq!(publisher.add("right", 10, entries.clone()).await.unwrap(), [Ok(()), Ok(())]);
        let taken = publisher.add("wrong", 10, entries).await.unwrap();
        assert!(taken.iter().all(Result::is_err) && taken.len() == 2, "{taken:?}");
        let length = redis.ask("XLEN right").await.unwrap();
        assert!(length.contains('2'), "{length}");
        let messages = [("a".to_owned(), &b"x"[..])];
        assert_eq!(publisher.publish(messages).await.unwrap(), [Ok(())], "nobody has to listen");
        redis.stop().await;
        assert!(publisher.publish([("a".to_owned(), &b"x"[..])]).await.is_err());
    }
}
