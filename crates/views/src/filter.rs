//! The filter of a request: `restarts>3,phase!=Running`.

use std::{cmp::Ordering, str::FromStr};

use crate::{
    row::RowRef,
    table::{Columns, Source},
};

/// The longest filter, in bytes, and its most terms.
const LONGEST: usize = 2 * 1024;
const MOST_TERMS: usize = 16;

/// Terms that must all hold: a column, `=`, `!=`, `>`, `>=`, `<` or `<=`, and a value.
///
/// Columns are named as the API server titles them, in any case and without spaces; `namespace`, `name` and
/// `resource` are columns too. The order of numbers is theirs: of a cell, the number at its beginning counts
/// (`3 (5m ago)` is 3). A cell without one is neither less nor greater. A row without the column does not
/// pass.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter(Vec<Term>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Term {
    column: String,
    operator: Operator,
    value: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

/// Longer ones come before their beginnings.
const OPERATORS: [(&str, Operator); 7] = [
    ("!=", Operator::NotEqual),
    (">=", Operator::GreaterOrEqual),
    ("<=", Operator::LessOrEqual),
    ("==", Operator::Equal),
    ("=", Operator::Equal),
    (">", Operator::Greater),
    ("<", Operator::Less),
];

/// Why a text is not a filter.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFilter {
    /// A term has no operator, no column, or a value that is no number where one is compared.
    #[error(
        "{0:?}: expected a column, one of = != > >= < <=, and a value, such as restarts>3,phase!=Running"
    )]
    Term(String),
    /// `<` or `>` and no number.
    #[error("{0:?}: expected a number after < or >")]
    Number(String),
    /// Ages grow without an event.
    #[error("the age of an object cannot be filtered: it changes without an event")]
    Age,
    /// It is too long.
    #[error("expected at most 16 terms and 2048 bytes")]
    TooLong,
}

/// Returns how columns are compared by name: in lower case, only letters and digits.
pub(crate) fn folded(name: &str) -> String {
    name.chars().filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

/// Returns the number at the beginning of a text.
fn number(text: &str) -> Option<f64> {
    let text = text.trim_start();
    let end = text
        .char_indices()
        .find(|(at, c)| !(c.is_ascii_digit() || *c == '.' || *at == 0 && matches!(c, '-' | '+')))
        .map_or(text.len(), |(at, _)| at);
    text.get(..end)?.parse().ok().filter(|number: &f64| number.is_finite())
}

impl FromStr for Filter {
    type Err = InvalidFilter;

    fn from_str(text: &str) -> Result<Self, InvalidFilter> {
        if text.len() > LONGEST {
            return Err(InvalidFilter::TooLong);
        }
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let terms = text.split(',').map(term).collect::<Result<Vec<_>, _>>()?;
        if terms.len() > MOST_TERMS { Err(InvalidFilter::TooLong) } else { Ok(Self(terms)) }
    }
}

fn term(text: &str) -> Result<Term, InvalidFilter> {
    let wrong = || InvalidFilter::Term(text.to_owned());
    let at = text.find(['!', '=', '<', '>']).ok_or_else(wrong)?;
    let (column, rest) = text.split_at(at);
    let found = OPERATORS.iter().find_map(|(sign, operator)| Some((rest.strip_prefix(sign)?, *operator)));
    let (value, operator) = found.ok_or_else(wrong)?;
    let (column, value) = (folded(column), value.trim().to_owned());
    if column.is_empty() || value.starts_with(['=', '<', '>']) {
        return Err(wrong());
    }
    if column == "age" {
        return Err(InvalidFilter::Age);
    }
    if !matches!(operator, Operator::Equal | Operator::NotEqual) && number(&value).is_none() {
        return Err(InvalidFilter::Number(text.to_owned()));
    }
    Ok(Term { column, operator, value })
}

/// Where a column of a row is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Namespace,
    Name,
    Resource,
    Cell(usize),
    /// These rows have no such column.
    None,
}

fn place(column: &str, aliases: &[(String, String)], columns: &Columns) -> Place {
    let named = |name: &str| {
        columns.iter().find_map(|column| match column.source {
            Source::Cell(at) if folded(&column.name) == name => Some(Place::Cell(at)),
            Source::Cell(_) | Source::Age => None,
        })
    };
    let alias = || aliases.iter().find(|(alias, _)| folded(alias) == column).map(|(_, name)| folded(name));
    match column {
        "namespace" => Place::Namespace,
        "name" => Place::Name,
        "resource" => Place::Resource,
        column => named(column).or_else(|| named(&alias()?)).unwrap_or(Place::None),
    }
}

impl Filter {
    /// Whether every row passes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the filter for rows with these columns. `aliases`: other names of columns.
    pub fn bind<'a>(&'a self, columns: &Columns, aliases: &[(String, String)]) -> BoundFilter<'a> {
        BoundFilter(self.0.iter().map(|term| (place(&term.column, aliases, columns), term)).collect())
    }

    /// Returns a column of the filter that none of these has, in lower case.
    pub fn unknown<'a>(
        &self,
        all: impl Iterator<Item = &'a Columns> + Clone,
        aliases: &[(String, String)],
    ) -> Option<&str> {
        let is_unknown =
            |term: &&Term| all.clone().all(|columns| place(&term.column, aliases, columns) == Place::None);
        self.0.iter().find(is_unknown).map(|term| &*term.column)
    }
}

/// A [`Filter`] for rows whose columns are known.
#[derive(Debug)]
pub struct BoundFilter<'a>(Vec<(Place, &'a Term)>);

impl BoundFilter<'_> {
    /// Whether a row passes. `resource` is what it is a row of.
    pub fn passes(&self, resource: &str, row: &RowRef<'_>) -> bool {
        self.0.iter().all(|(place, term)| {
            let cell = match place {
                Place::Namespace => row.namespace(),
                Place::Name => row.name(),
                Place::Resource => resource,
                Place::Cell(at) => row.cell(*at),
                Place::None => return false,
            };
            term.holds(cell)
        })
    }
}

impl Term {
    fn holds(&self, cell: &str) -> bool {
        let order = || number(cell)?.partial_cmp(&number(&self.value)?);
        // The end of a list is cut off, so `=` compares texts, and numbers only if both are nothing else.
        let is_equal = || {
            cell == self.value
                || matches!((cell.parse::<f64>(), self.value.parse::<f64>()), (Ok(a), Ok(b)) if a == b)
        };
        match self.operator {
            Operator::Equal => is_equal(),
            Operator::NotEqual => !is_equal(),
            Operator::Less => order() == Some(Ordering::Less),
            Operator::LessOrEqual => matches!(order(), Some(Ordering::Less | Ordering::Equal)),
            Operator::Greater => order() == Some(Ordering::Greater),
            Operator::GreaterOrEqual => matches!(order(), Some(Ordering::Greater | Ordering::Equal)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(filter: &str, cell: &str) -> bool {
        filter.parse::<Filter>().unwrap().0.iter().all(|term| term.holds(cell))
    }

    #[test]
    fn numbers_are_compared_as_numbers_and_texts_as_texts() {
        for (filter, cell, expected) in [
            ("restarts>3", "4 (5m ago)", true),
            ("restarts>3", "10", true),
            ("restarts>3", "3 (1s ago)", false),
            ("restarts>=3", "3", true),
            ("restarts<3", "<none>", false),
            ("restarts<3", "", false),
            ("restarts<=2.5", "2", true),
            ("phase!=Running", "Pending", true),
            ("phase!=Running", "Running", false),
            ("ready=1/2", "1/2", true),
            ("ready=1", "1/2", false),
            ("count=1", "1.0", true),
            ("count==-1", "-1", true),
        ] {
            assert_eq!(holds(filter, cell), expected, "{filter} {cell:?}");
        }
    }

    #[test]
    fn wrong_filters_are_refused_with_the_reason() {
        let error = |filter: &str| filter.parse::<Filter>().unwrap_err();
        for wrong in ["restarts", "=3", "a!b", "a=b,", ",", "a>=>1", "a===b"] {
            assert!(matches!(error(wrong), InvalidFilter::Term(_)), "{wrong}");
        }
        assert_eq!(error("restarts>many"), InvalidFilter::Number("restarts>many".to_owned()));
        assert_eq!(error("AGE>5"), InvalidFilter::Age);
        assert_eq!(error(&"a=b,".repeat(17)), InvalidFilter::Term(String::new()));
        assert_eq!(error(&vec!["a=b"; 17].join(",")), InvalidFilter::TooLong);
        assert_eq!(error(&format!("a={}", "b".repeat(LONGEST))), InvalidFilter::TooLong);
        assert!(" ".parse::<Filter>().unwrap().is_empty());
    }
}
