//! Globs of manifest projects: the rules of doublestar v2, which 14.1 uses.
//!
//! `*` and `?` stay inside a segment of the path, `**` as a whole segment is any number of folders, `[a-z]`
//! and
//! `[^a-z]` are classes, `{a,b}` alternatives, `\` takes the next character as it is. A glob is compiled to a
//! state machine, so a match takes at most one step for each state and character, however many wildcards
//! there are.
//!
//! doublestar finds a malformed pattern only when it gets there. Here it is an error at once. It also misses
//! some matches of a `*` directly before `{`, which are found here.

#[cfg(test)]
mod tests;

/// The longest glob, in characters.
const MAX_LENGTH: usize = 1_024;

/// Alternatives inside alternatives.
const MAX_DEPTH: usize = 8;

/// A glob that is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason} at character {at}")]
pub struct InvalidGlob {
    reason: &'static str,
    at: usize,
}

/// A match that takes too many steps: the glob has too many wildcards for this path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("takes more than {} steps: use fewer wildcards", Glob::STEPS)]
pub struct TooManySteps;

/// A glob of a manifest project, such as `/manifests/**/*.{yaml,yml,json}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    pattern: String,
    /// The length of the folder in the pattern; 0: the root.
    root: usize,
    recursive: bool,
    states: Vec<State>,
    start: usize,
}

/// A state of the machine: what it takes, and the state that follows.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// The path must end here.
    End,
    Char(char, usize),
    /// Any character but `/`.
    Any(usize),
    Class(Class, usize),
    Separator(usize),
    /// Any number of characters but `/`.
    Star(usize),
    /// Any number of characters.
    Rest,
    /// Nothing: goes on in each of these.
    Fork(Vec<usize>),
    /// The inside of a folder that `**` spans: up to its `/`, then this state.
    Folder(usize),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Class {
    negated: bool,
    ranges: Vec<(char, char)>,
}

/// A part of a pattern.
#[derive(Debug)]
enum Token {
    Char(char),
    Any,
    Class(Class),
    Separator,
    Star,
    Alternatives(Vec<Vec<Token>>),
}

impl Glob {
    /// The steps that one match may take.
    pub const STEPS: usize = 100_000;
    /// The glob of a project that has none, as in 14.1.
    pub const DEFAULT: &str = "**/*.{yaml,yml,json}";

    /// Parses a glob. A leading `/` is removed.
    ///
    /// # Errors
    /// [`InvalidGlob`]: it is empty or too long, a bracket is not closed, or a class is malformed.
    pub fn parse(glob: &str) -> Result<Self, InvalidGlob> {
        let pattern = glob.strip_prefix('/').unwrap_or(glob);
        let offset = glob.chars().count() - pattern.chars().count();
        let chars: Vec<char> = pattern.chars().collect();
        if chars.is_empty() {
            return Err(InvalidGlob { reason: "nothing", at: 1 });
        }
        if chars.len() > MAX_LENGTH {
            return Err(InvalidGlob {
                reason: "more than 1024 characters, the first of them",
                at: MAX_LENGTH + 1,
            });
        }
        let tokens =
            tokens(&chars, 0, 0).map_err(|error| InvalidGlob { at: error.at + offset + 1, ..error })?;
        let mut states = vec![State::End];
        let start = compile(&tokens, true, 0, &mut states);

        let special = pattern.find(['\\', '*', '?', '[', ']', '{', '}']).unwrap_or(pattern.len());
        let root = pattern[..special].rfind('/').unwrap_or(0);
        let rest = &pattern[if root == 0 { 0 } else { root + 1 }..];
        let recursive = rest.contains(['[', '/']) || rest.contains("**");
        Ok(Self { pattern: pattern.to_owned(), root, recursive, states, start })
    }

    /// The glob without a leading `/`.
    pub fn as_str(&self) -> &str {
        &self.pattern
    }

    /// The longest folder above all matches, without wildcards: where a listing begins. `.` is the root.
    pub fn root(&self) -> &str {
        if self.root == 0 { "." } else { &self.pattern[..self.root] }
    }

    /// Whether files in folders below [`root`](Self::root) may match.
    pub fn is_recursive(&self) -> bool {
        self.recursive
    }

    /// Whether the whole path matches. It has no leading `/`.
    ///
    /// # Errors
    /// [`TooManySteps`].
    pub fn matches(&self, path: &str) -> Result<bool, TooManySteps> {
        let mut steps = 0;
        let mut now = Active::new(self.states.len());
        let mut next = Active::new(self.states.len());
        self.enter(self.start, &mut now, &mut steps)?;
        for c in path.chars() {
            next.clear();
            for at in 0..now.list.len() {
                let state = now.list[at];
                let in_segment = c != '/';
                match &self.states[state] {
                    State::Char(wanted, then) if *wanted == c && in_segment => {
                        self.enter(*then, &mut next, &mut steps)?
                    }
                    State::Any(then) if in_segment => self.enter(*then, &mut next, &mut steps)?,
                    State::Class(class, then) if in_segment && class.contains(c) => {
                        self.enter(*then, &mut next, &mut steps)?;
                    }
                    State::Separator(then) if !in_segment => self.enter(*then, &mut next, &mut steps)?,
                    State::Star(_) if in_segment => self.enter(state, &mut next, &mut steps)?,
                    State::Rest => self.enter(state, &mut next, &mut steps)?,
                    State::Folder(then) => {
                        let then = if in_segment { state } else { *then };
                        self.enter(then, &mut next, &mut steps)?;
                    }
                    _ => steps += 1,
                }
            }
            std::mem::swap(&mut now, &mut next);
            if now.list.is_empty() {
                return Ok(false);
            }
        }
        Ok(now.list.iter().any(|state| matches!(self.states[*state], State::End | State::Rest)))
    }

    /// Makes a state active, and those that it reaches without a character.
    fn enter(&self, state: usize, active: &mut Active, steps: &mut usize) -> Result<(), TooManySteps> {
        // States come after those that follow them, except in a loop, so this ends; `active` ends loops.
        let mut open = vec![state];
        while let Some(state) = open.pop() {
            *steps += 1;
            if *steps > Self::STEPS {
                return Err(TooManySteps);
            }
            if !active.insert(state) {
                continue;
            }
            match &self.states[state] {
                State::Star(then) => open.push(*then),
                State::Fork(all) => open.extend(all),
                _ => {}
            }
        }
        Ok(())
    }
}

/// The states in which a match may be.
struct Active {
    list: Vec<usize>,
    has: Vec<bool>,
}

impl Active {
    fn new(states: usize) -> Self {
        Self { list: Vec::new(), has: vec![false; states] }
    }

    fn insert(&mut self, state: usize) -> bool {
        let new = !self.has[state];
        if new {
            self.has[state] = true;
            self.list.push(state);
        }
        new
    }

    fn clear(&mut self) {
        for state in self.list.drain(..) {
            self.has[state] = false;
        }
    }
}

impl Class {
    fn contains(&self, c: char) -> bool {
        self.ranges.iter().any(|(low, high)| (*low..=*high).contains(&c)) != self.negated
    }
}

/// Reads a pattern. `offset` is that of its first character, for errors.
fn tokens(pattern: &[char], offset: usize, depth: usize) -> Result<Vec<Token>, InvalidGlob> {
    let wrong = |reason, at: usize| Err(InvalidGlob { reason, at: offset + at });
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(c) = pattern.get(at) {
        match c {
            '/' => found.push(Token::Separator),
            '*' => found.push(Token::Star),
            '?' => found.push(Token::Any),
            '\\' => match pattern.get(at + 1) {
                Some(c) => {
                    found.push(Token::Char(*c));
                    at += 1;
                }
                None => return wrong("`\\` without a character after it", at),
            },
            '[' => {
                let Some(end) = closing(&pattern[at + 1..]) else { return wrong("`[` without `]`", at) };
                match class(&pattern[at + 1..at + 1 + end]) {
                    Some(class) => found.push(Token::Class(class)),
                    None => return wrong("a malformed class", at),
                }
                at += end + 1;
            }
            '{' => {
                if depth == MAX_DEPTH {
                    return wrong("more than 8 `{` inside each other", at);
                }
                let Some((parts, end)) = alternatives(&pattern[at + 1..]) else {
                    return wrong("`{` without `}`", at);
                };
                let inside = &pattern[at + 1..];
                let parts = parts
                    .into_iter()
                    .map(|part| tokens(&inside[part.clone()], offset + at + 1 + part.start, depth + 1));
                found.push(Token::Alternatives(parts.collect::<Result<_, _>>()?));
                at += end + 1;
            }
            c => found.push(Token::Char(*c)),
        }
        at += 1;
    }
    Ok(found)
}

/// Returns where the first `]` is that is not escaped.
fn closing(pattern: &[char]) -> Option<usize> {
    let mut escaped = false;
    pattern.iter().position(|c| {
        let ends = *c == ']' && !escaped;
        escaped = *c == '\\' && !escaped;
        ends
    })
}

/// Splits `a,b}…` into its parts; also returns where the `}` is.
fn alternatives(pattern: &[char]) -> Option<(Vec<std::ops::Range<usize>>, usize)> {
    let (mut parts, mut start, mut open, mut escaped) = (Vec::new(), 0, 1, false);
    for (at, c) in pattern.iter().enumerate() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '{' => open += 1,
            '}' if open == 1 => {
                parts.push(start..at);
                return Some((parts, at));
            }
            '}' => open -= 1,
            ',' if open == 1 => {
                parts.push(start..at);
                start = at + 1;
            }
            _ => {}
        }
    }
    None
}

fn class(pattern: &[char]) -> Option<Class> {
    let (negated, rest) = match pattern {
        [] => return None,
        ['^', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    let mut ranges = Vec::new();
    let mut chars = rest.iter().copied().peekable();
    while let Some(low) = chars.next() {
        let low = match low {
            '-' => return None,
            '\\' => chars.next()?,
            low => low,
        };
        let high = if chars.next_if_eq(&'-').is_some() {
            match chars.next()? {
                '-' => return None,
                '\\' => chars.next()?,
                high => high,
            }
        } else {
            low
        };
        ranges.push((low, high));
    }
    Some(Class { negated, ranges })
}

/// Adds the states of a pattern that goes on in `then`; returns its first one. `at_start`: whether it begins
/// a segment, where `**` may span folders.
fn compile(tokens: &[Token], at_start: bool, then: usize, states: &mut Vec<State>) -> usize {
    let mut then = then;
    let mut end = tokens.len();
    while end > 0 {
        let token = &tokens[end - 1];
        let begins = |at: usize| if at == 0 { at_start } else { ends_segment(&tokens[at - 1]) };
        let state = match token {
            Token::Star if end >= 2 && matches!(tokens[end - 2], Token::Star) && begins(end - 2) => {
                let after = match &states[then] {
                    State::Separator(after) => Some(*after),
                    _ => None,
                };
                let folders = match after {
                    None if states[then] == State::End => Some(State::Rest),
                    None => Some(State::Star(then)),
                    Some(after) => {
                        let fork = states.len();
                        states.push(State::Fork(vec![after, fork + 1]));
                        states.push(State::Folder(fork));
                        then = fork;
                        None
                    }
                };
                end -= 2;
                match folders {
                    Some(state) => state,
                    None => continue,
                }
            }
            token => {
                end -= 1;
                match token {
                    Token::Char(c) => State::Char(*c, then),
                    Token::Any => State::Any(then),
                    Token::Class(class) => State::Class(class.clone(), then),
                    Token::Separator => State::Separator(then),
                    Token::Star => State::Star(then),
                    Token::Alternatives(all) => {
                        let all = all.iter().map(|one| compile(one, false, then, states)).collect();
                        State::Fork(all)
                    }
                }
            }
        };
        states.push(state);
        then = states.len() - 1;
    }
    then
}

/// Whether what follows a token begins a segment.
fn ends_segment(token: &Token) -> bool {
    match token {
        Token::Separator => true,
        Token::Alternatives(all) => {
            all.iter().all(|one| one.last().is_some_and(|last| matches!(last, Token::Separator)))
        }
        _ => false,
    }
}

/// Whether a file is in a folder whose name begins with `.`: such files are skipped. Files at the root whose
/// own name begins with `.` are not.
pub fn is_hidden(path: &str) -> bool {
    let mut segments = path.rsplit('/');
    segments.next();
    segments.any(|folder| folder.starts_with('.'))
}
