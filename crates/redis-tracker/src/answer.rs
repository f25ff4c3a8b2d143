//! Decoding of answers of Redis.

use redis::{FromRedisValue, Value};

use crate::connect::Error;

/// Returns the value of an answer; `what` names the command in errors.
pub(crate) fn take<T: FromRedisValue>(value: Value, what: &'static str) -> Result<T, Error> {
    let value = value.extract_error()?;
    redis::from_redis_value(value).map_err(|_| Error::Unexpected(what))
}
