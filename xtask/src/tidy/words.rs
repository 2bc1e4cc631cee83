//! Pure: rules for the words of comments and names, and figures of the whole tree.

use std::{collections::BTreeMap, fmt};

use super::rules::{SourceFile, TidyFinding, before_tests, error, strip};

/// Words with which a doc must not begin, because they begin a question.
const QUESTION_WORDS: [&str; 10] =
    ["what", "whether", "how", "who", "whom", "whose", "where", "which", "why", "when"];
/// Phrases that lines of comments must not contain, each with its replacement.
const RETIRED_PHRASES: [(&str, &str); 7] = [
    ("anew", "again"),
    ("for ever", "forever, or without limit"),
    ("kernel half", "eBPF programs"),
    ("nobody", "no client, no controller, …"),
    ("somebody", "a client, a user, …"),
    ("the same of", "the thing's own name"),
    ("whoever", "a client that, a user who, …"),
];
/// Maximum number of words of a short doc. Most short docs only repeat the name.
const SHORT_DOC_WORDS: usize = 3;
/// Maximum percentage of docs that are short.
const MAX_SHORT_PERCENT: f64 = 4.0;
/// Crates that contain only tests. Comments inside their functions are not counted.
const TEST_CRATES: [&str; 2] = ["streams", "tests"];

/// Figures of all files read so far.
#[derive(Debug, Default)]
pub(crate) struct WordFigures {
    docs: usize,
    question_docs: usize,
    short_docs: usize,
    /// Files that define a type of each name.
    types: BTreeMap<String, Vec<String>>,
    /// Lines of code outside tests, and comment lines inside functions there.
    code_lines: usize,
    inner_comment_lines: usize,
}

impl WordFigures {
    /// Adds a file to the figures, and returns its violations.
    pub(crate) fn check_file(&mut self, file: &SourceFile<'_>) -> Vec<TidyFinding> {
        let mut findings = Vec::new();
        for doc in docs(file.text) {
            self.docs += 1;
            self.short_docs += usize::from(doc.word_count() <= SHORT_DOC_WORDS);
            let location = format!("{}:{}", file.path, doc.line);
            if doc.is_question() {
                self.question_docs += 1;
                findings.push(error(
                    location,
                    "a doc begins with a noun or a verb, not with a question",
                ));
            } else if doc.word_count() == 1 {
                findings.push(error(location, "a doc of one word only repeats the name"));
            }
        }
        findings.extend(find_retired(file));
        for name in types(file.text) {
            self.types.entry(name.to_owned()).or_default().push(file.path.to_owned());
        }
        let is_test = TEST_CRATES.contains(&file.krate)
            || ["/tests", "/benches/"].iter().any(|it| file.path.contains(it));
        if !is_test {
            let (code, inner) = inner_comments(before_tests(file.text));
            self.code_lines += code;
            self.inner_comment_lines += inner;
        }
        findings
    }

    /// Returns the violations of the tree as a whole.
    pub(crate) fn check_totals(&self) -> Vec<TidyFinding> {
        let short = percent(self.short_docs, self.docs);
        let message = format!(
            "{short:.1} % of all docs have {SHORT_DOC_WORDS} words or fewer; the maximum is {MAX_SHORT_PERCENT} %"
        );
        let short = (short > MAX_SHORT_PERCENT).then(|| error("the tree", message));
        let shared = self.types.iter().filter(|(_, locations)| locations.len() > 1);
        let shared = shared.map(|(name, locations)| {
            let others = locations[1..].join(", ");
            let message = format!("{others} also define a type `{name}`: give each its own name");
            error(&locations[0], message)
        });
        short.into_iter().chain(shared).collect()
    }
}

impl fmt::Display for WordFigures {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total: usize = self.types.values().map(Vec::len).sum();
        let shared: usize = self.types.values().map(Vec::len).filter(|count| *count > 1).sum();
        write!(
            out,
            "{} docs: {:.1} % begin with a question, {:.1} % have {SHORT_DOC_WORDS} words or fewer; types that share a name {:.1} %; \
             comments inside functions {:.1} %",
            self.docs,
            percent(self.question_docs, self.docs),
            percent(self.short_docs, self.docs),
            percent(shared, total),
            percent(self.inner_comment_lines, self.code_lines),
        )
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of lines")]
fn percent(part: usize, total: usize) -> f64 {
    100.0 * part as f64 / total.max(1) as f64
}

/// A run of `///` or `//!` lines.
#[derive(Debug)]
struct DocComment {
    /// Number of its first line.
    line: usize,
    text: String,
}

impl DocComment {
    fn is_question(&self) -> bool {
        let text = self.text.trim_start_matches("Pure:").trim_start_matches("Shell:");
        let mut words = text.split(|letter: char| !letter.is_alphabetic() && letter != '\'');
        let first = words.find(|word| !word.is_empty()).unwrap_or_default().to_lowercase();
        QUESTION_WORDS.contains(&first.as_str())
    }

    /// Number of its words; code in backticks is one.
    fn word_count(&self) -> usize {
        let pieces = self.text.split('`').enumerate();
        let count = |(index, text): (usize, &str)| match index % 2 {
            0 => text.split_whitespace().filter(|it| it.contains(char::is_alphanumeric)).count(),
            _ => 1,
        };
        pieces.map(count).sum()
    }
}

fn docs(text: &str) -> Vec<DocComment> {
    let mut docs: Vec<DocComment> = Vec::new();
    let mut last = None;
    for (index, line) in text.lines().enumerate() {
        let marks = ["//!", "///"];
        let line = line.trim_start();
        let marker = marks.into_iter().find(|it| line.starts_with(it) && !line.starts_with("////"));
        if let Some(marker) = marker {
            let body = &line[marker.len()..];
            match docs.last_mut().filter(|_| last == Some(marker)) {
                // Lines of the same kind that follow each other are one doc.
                Some(doc) => doc.text += body,
                None => {
                    docs.push(DocComment { line: index + 1, text: body.trim_start().to_owned() })
                }
            }
        }
        last = marker;
    }
    docs
}

/// Returns the retired phrases in lines of comments. A phrase across two lines and a comment behind code are not found.
fn find_retired<'a>(file: &'a SourceFile<'_>) -> impl Iterator<Item = TidyFinding> + 'a {
    let comments =
        file.text.lines().enumerate().filter(|(_, it)| it.trim_start().starts_with("//"));
    comments.filter_map(|(index, line)| {
        let line = line.to_lowercase();
        let (word, replacement) = RETIRED_PHRASES.iter().find(|(word, _)| has_word(&line, word))?;
        let location = format!("{}:{}", file.path, index + 1);
        Some(error(location, format!("`{word}` is not used in comments: write {replacement}")))
    })
}

/// Returns true if `line` contains `phrase` with no letter before or after it.
fn has_word(line: &str, phrase: &str) -> bool {
    line.match_indices(phrase).any(|(at, _)| {
        let is_letter = |letter: char| letter.is_alphanumeric() || letter == '_';
        !line[..at].ends_with(is_letter) && !line[at + phrase.len()..].starts_with(is_letter)
    })
}

/// Names of the types that a file defines, without associated types, which are indented.
fn types(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let position = words.iter().position(|it| !it.starts_with("pub") && *it != "unsafe")?;
        // `pub(in crate::x) struct` would be two words, and does not occur.
        let is_type = match words[position] {
            "struct" | "enum" | "union" | "trait" => true,
            "type" => !line.starts_with(' '),
            _ => false,
        };
        let name = words.get(position + 1).filter(|_| is_type)?;
        name.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next()
    })
}

/// Counts lines of code, and lines inside functions that are only a comment. The text is formatted by rustfmt.
fn inner_comments(text: &str) -> (usize, usize) {
    let (mut code, mut inner) = (0, 0);
    // Indentation of the function around a line. The function ends at the first brace with that indentation.
    let mut function: Option<usize> = None;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let indentation = line.len() - line.trim_start().len();
        if line.trim_start().starts_with("//") {
            let is_doc = line.trim_start().starts_with("///");
            inner += usize::from(!is_doc && function.is_some());
            continue;
        }
        code += 1;
        let stripped = strip(line).trim();
        match function {
            Some(at) if at == indentation && stripped.starts_with('}') => function = None,
            // A signature of several lines without a body.
            Some(at) if at == indentation && stripped.ends_with(';') => function = None,
            None if is_function(stripped) && !line.ends_with(['}', ';']) => {
                function = Some(indentation)
            }
            _ => {}
        }
    }
    (code, inner)
}

/// Returns true if a function begins in this line: `fn` is the first word after its modifiers.
fn is_function(code: &str) -> bool {
    let is_modifier = |word: &&str| {
        word.starts_with("pub") || ["const", "async", "unsafe", "extern"].contains(word)
    };
    code.split_whitespace().find(|word| !is_modifier(word)) == Some("fn")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (WordFigures, Vec<String>) {
        let mut words = WordFigures::default();
        let file = SourceFile { krate: "agent", path: "agent/src/a.rs", text };
        let findings = words.check_file(&file);
        (words, findings.into_iter().map(|it| it.location).collect())
    }

    #[test]
    fn docs_that_are_questions_or_one_word_are_errors() {
        let text = "//! Pure: what a pod is.\n\n/// Why.\nstruct A;\n/// Pod.\nstruct B;\n/// `Pod` by its uid.\nstruct C;\n";
        let (words, locations) = read(text);
        assert_eq!(locations, ["agent/src/a.rs:1", "agent/src/a.rs:3", "agent/src/a.rs:5"]);
        assert_eq!((words.docs, words.question_docs, words.short_docs), (4, 2, 2));
        assert_eq!(words.check_totals().len(), 1);
    }

    #[test]
    fn a_retired_word_in_a_comment_is_an_error_and_in_code_is_none() {
        for (word, _) in RETIRED_PHRASES {
            let text = format!("// Sent {word}.\nlet a = \"{word}\";\n// x{word}x\n");
            assert_eq!(read(&text).1, ["agent/src/a.rs:1"], "{word}");
        }
    }

    #[test]
    fn types_of_one_name_are_counted_once_each() {
        let (words, _) = read(
            "pub(crate) struct A<T>(T);\nimpl A {\n    type B = u8;\n}\nmod m {\n    enum A {}\n}\ntype B = u8;\n",
        );
        let counts: Vec<_> =
            words.types.iter().map(|(name, it)| (name.as_str(), it.len())).collect();
        assert_eq!(counts, [("A", 2), ("B", 1)]);
        let messages: Vec<String> = words.check_totals().into_iter().map(|it| it.message).collect();
        let expected = "agent/src/a.rs also define a type `A`: give each its own name";
        assert_eq!(messages, [expected]);
    }

    #[test]
    fn comments_inside_functions_are_counted_and_others_are_not() {
        let text = "// Outside.\nconst A: u8 = 1;\nfn a(\n    b: u8,\n) {\n    // Inside.\n    b(\n        \"// Text.\",\n    );\n}\ntrait T {\n    fn c();\n    d: fn(u8),\n    // Outside.\n}\n";
        assert_eq!(inner_comments(text), (12, 1));
    }
}
