//! Reads JSON of servers part by part, so that nothing is kept of what is beyond a limit.

use std::{fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use crate::AnswerError;

/// The longest reason why an answer is none of Prometheus, in characters.
const LONGEST_REASON: usize = 512;

pub(crate) fn invalid(error: impl fmt::Display) -> AnswerError {
    // What is wrong may be in it, and that may be long.
    AnswerError::Invalid(error.to_string().chars().take(LONGEST_REASON).collect())
}

/// Gives each element of an array to `take`, which ends the reading with an error.
///
/// # Errors
/// That of `take`, or [`AnswerError::Invalid`].
pub(crate) fn elements<'de, T: Deserialize<'de>>(
    json: &'de RawValue,
    take: impl FnMut(T) -> Result<(), AnswerError>,
) -> Result<(), AnswerError> {
    let mut failed = None;
    let visitor = Each { take, failed: &mut failed, of: PhantomData::<T> };
    let read = serde_json::Deserializer::from_str(json.get()).deserialize_seq(visitor);
    failed.map_or(read.map_err(invalid), Err)
}

/// As [`elements`], with the names and values of an object.
///
/// # Errors
/// As of [`elements`].
pub(crate) fn entries<'de, T: Deserialize<'de>>(
    json: &'de RawValue,
    take: impl FnMut((String, T)) -> Result<(), AnswerError>,
) -> Result<(), AnswerError> {
    let mut failed = None;
    let visitor = Each { take, failed: &mut failed, of: PhantomData::<(String, T)> };
    let read = serde_json::Deserializer::from_str(json.get()).deserialize_map(Entries(visitor));
    failed.map_or(read.map_err(invalid), Err)
}

struct Each<'a, T, F> {
    take: F,
    failed: &'a mut Option<AnswerError>,
    of: PhantomData<T>,
}

impl<T, F: FnMut(T) -> Result<(), AnswerError>> Each<'_, T, F> {
    fn give<E: serde::de::Error>(&mut self, element: T) -> Result<(), E> {
        (self.take)(element).map_err(|error| {
            *self.failed = Some(error);
            E::custom("it is not read further")
        })
    }
}

impl<'de, T: Deserialize<'de>, F: FnMut(T) -> Result<(), AnswerError>> Visitor<'de> for Each<'_, T, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut array: A) -> Result<(), A::Error> {
        while let Some(element) = array.next_element()? {
            self.give::<A::Error>(element)?;
        }
        Ok(())
    }
}

struct Entries<V>(V);

impl<'de, T, F> Visitor<'de> for Entries<Each<'_, (String, T), F>>
where
    T: Deserialize<'de>,
    F: FnMut((String, T)) -> Result<(), AnswerError>,
{
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut object: A) -> Result<(), A::Error> {
        while let Some(entry) = object.next_entry()? {
            self.0.give::<A::Error>(entry)?;
        }
        Ok(())
    }
}
