//! Pure: checks that the code defines the names in `docs/glossary.md`, and that it has no retired word.

use std::collections::BTreeMap;

use super::rules::{SourceFile, TidyFinding, error, strip};

/// Path of the glossary.
pub(crate) const GLOSSARY: &str = "docs/glossary.md";
/// Heading above the table of the words that the code no longer uses.
const RETIRED_HEADING: &str = "## Retired words";

/// Words of the glossary.
#[derive(Debug, Default)]
pub(crate) struct Glossary {
    /// Names whose definition was not read yet, each with its file and the line of its row.
    undefined: Vec<(String, String, usize)>,
    /// Retired words, each with the word that replaces it.
    retired: BTreeMap<String, String>,
}

impl Glossary {
    /// Parses the page. Rows of the first table end with `` `name` in `path` ``, rows of the second are
    /// `` | `word` | replacement | ``.
    pub(crate) fn parse(text: &str) -> (Self, Vec<TidyFinding>) {
        let mut glossary = Self::default();
        let mut findings = Vec::new();
        let mut is_retired = false;
        for (index, line) in text.lines().enumerate() {
            is_retired |= line == RETIRED_HEADING;
            let location = format!("{GLOSSARY}:{}", index + 1);
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            // Headings and the lines below them.
            if !line.starts_with('|') || cells[0].starts_with("---") || cells[0] == "word" {
                continue;
            }
            let code: Vec<&str> = cells[cells.len() - 1].split('`').skip(1).step_by(2).collect();
            if is_retired {
                let word = cells[0].trim_matches('`').to_owned();
                glossary.retired.insert(word, cells[1].to_owned());
            } else if let [names @ .., path] = code.as_slice() {
                for name in names {
                    let row = ((*name).to_owned(), (*path).to_owned(), index + 1);
                    glossary.undefined.push(row);
                }
                if names.is_empty() {
                    findings.push(error(location, "names no item of the code"));
                }
            } else {
                findings.push(error(location, "does not name the file that defines the word"));
            }
        }
        (glossary, findings)
    }

    /// Reads one source file, and returns the retired words in its code.
    pub(crate) fn check_file(&mut self, file: &SourceFile<'_>) -> Vec<TidyFinding> {
        // A row is done once its name is found; those left at the end have no definition.
        self.undefined.retain(|(name, path, _)| {
            file.path != path || !file.text.lines().any(|line| defines(line, name))
        });
        let mut findings = Vec::new();
        for (index, line) in file.text.lines().enumerate() {
            for part in identifier_words(strip(line)) {
                if let Some(replacement) = self.retired.get(&part) {
                    let location = format!("{}:{}", file.path, index + 1);
                    findings.push(error(location, format!("`{part}` is retired: {replacement}")));
                }
            }
        }
        findings
    }

    /// Returns the rows whose file does not define the name.
    pub(crate) fn check_definitions(&self) -> Vec<TidyFinding> {
        let finding = |(name, path, line): &(String, String, usize)| {
            error(format!("{GLOSSARY}:{line}"), format!("{path} defines no `{name}`"))
        };
        self.undefined.iter().map(finding).collect()
    }
}

/// Returns true if a line defines the item `name`: a type, function, module, constant, field or variant.
fn defines(line: &str, name: &str) -> bool {
    let code = strip(line);
    let Some(offset) = code.find(name) else { return false };
    let (before, after) = (code[..offset].trim_end(), &code[offset + name.len()..]);
    if after.starts_with(|letter: char| letter.is_alphanumeric() || letter == '_') {
        return false;
    }
    let keywords = ["struct", "enum", "trait", "type", "fn", "mod", "const", "static", "union"];
    let word = before.rsplit(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
    let is_member = before.is_empty() || before == "pub" || before.ends_with(')');
    keywords.contains(&word) || (is_member && after.starts_with([':', ',', '(', ' ']))
}

/// Words of the identifiers in a line of code, in small letters: `PendingRequest` has two.
fn identifier_words(code: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut last = ' ';
    for letter in code.chars() {
        // A capital letter begins a word only behind a small one: `TLS` is one word.
        let is_start = !last.is_alphanumeric() || (letter.is_uppercase() && last.is_lowercase());
        if letter.is_alphanumeric() {
            if is_start {
                parts.push(String::new());
            }
            if let Some(part) = parts.last_mut() {
                part.extend(letter.to_lowercase());
            }
        }
        last = letter;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
# Glossary

| word | meaning | defined in |
|---|---|---|
| pending request | a request on its way | `PendingRequest` in `activator/src/request.rs` |
| permit | the right to send | `Permit` in `activator/src/request.rs` |

## Retired words

| word | now |
|---|---|
| `errand` | pending request |
";

    fn read(text: &str) -> (Vec<TidyFinding>, Vec<TidyFinding>) {
        let (mut glossary, findings) = Glossary::parse(PAGE);
        assert_eq!(findings, []);
        let file = SourceFile { krate: "activator", path: "activator/src/request.rs", text };
        (glossary.check_file(&file), glossary.check_definitions())
    }

    #[test]
    fn a_word_that_its_file_does_not_define_is_an_error() {
        let (_, undefined) = read("pub(crate) struct PendingRequest {\n    permit: Permit,\n}\n");
        assert_eq!(undefined.len(), 1);
        assert!(undefined[0].message.contains("`Permit`"), "{undefined:?}");
        assert_eq!(read("struct PendingRequest;\ntype Permit = u8;\n").1, []);
    }

    #[test]
    fn a_retired_word_is_found_in_every_identifier_and_in_no_comment() {
        for code in ["struct Errand;", "let my_errand = 1;", "PendingErrand::new()", "ERRAND"] {
            assert_eq!(read(code).0.len(), 1, "{code}");
        }
        for code in ["// errand", "let errands = 1;", "let a = \"errand\";"] {
            assert_eq!(read(code).0, [], "{code}");
        }
    }

    #[test]
    fn a_row_without_a_definition_is_an_error() {
        let page = "| word | in |\n|---|---|\n| pod | somewhere |\n| node | `agent/src/a.rs` |\n";
        assert_eq!(Glossary::parse(page).1.len(), 2);
    }
}
