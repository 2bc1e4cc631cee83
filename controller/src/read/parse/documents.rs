//! Pure: the documents of a YAML file. The YAML parser cannot find the next document after a syntax error, so documents
//! are separated before they are parsed.

use serde::Deserialize as _;
use serde_json::Value;

/// Parses each document of a file, or states why it cannot be read, with the line in the file.
pub(super) fn yaml_documents(file: &[u8]) -> Vec<Result<Value, String>> {
    let mut out = Vec::new();
    for (lines_before, part) in split_documents(file) {
        match std::str::from_utf8(part) {
            Ok(text) => parse_part(text, lines_before, &mut out),
            Err(error) => {
                let line = lines_before + count_lines(&part[..error.valid_up_to()]) + 1;
                out.push(Err(format!("not UTF-8 at line {line}")));
            }
        }
    }
    out
}

/// Parses one part of a file, most often a single document. After a syntax error, its rest is left out.
fn parse_part(text: &str, lines_before: usize, out: &mut Vec<Result<Value, String>>) {
    for document in serde_norway::Deserializer::from_str(text) {
        match Value::deserialize(document) {
            Ok(value) => out.push(Ok(value)),
            Err(error) => {
                // Empty lines in front make the error name the line of the file.
                let padded = "\n".repeat(lines_before) + text;
                let located = serde_norway::Deserializer::from_str(&padded)
                    .find_map(|document| Value::deserialize(document).err());
                return out.push(Err(located.unwrap_or(error).to_string()));
            }
        }
    }
}

/// Splits a file before each line that begins a document, and after each line that ends one. No content can have such
/// lines (YAML 1.2 §9.1.2). Each part comes with the number of lines before it.
fn split_documents(file: &[u8]) -> Vec<(usize, &[u8])> {
    let mut parts = Vec::new();
    let (mut start, mut at, mut line_count, mut lines_before) = (0, 0, 0, 0);
    let mut has_content = false;
    for line in file.split_inclusive(|byte| *byte == b'\n') {
        let (begins, ends) = (is_marker(line, b"---"), is_marker(line, b"..."));
        // Directives and comments belong to the document that follows.
        if begins && has_content {
            parts.push((lines_before, &file[start..at]));
            (start, lines_before) = (at, line_count);
        }
        has_content = begins || (has_content || !is_prologue(line));
        at += line.len();
        line_count += 1;
        if ends {
            parts.push((lines_before, &file[start..at]));
            (start, lines_before, has_content) = (at, line_count, false);
        }
    }
    parts.push((lines_before, &file[start..]));
    parts
}

/// Returns true if the line begins with a marker of a document's begin or end.
fn is_marker(line: &[u8], marker: &[u8]) -> bool {
    line.strip_prefix(marker)
        .is_some_and(|rest| rest.first().is_none_or(|byte| b" \t\r\n".contains(byte)))
}

/// Returns true if the line may precede a document: a directive, a comment or an empty line.
fn is_prologue(line: &[u8]) -> bool {
    line.first() == Some(&b'%') || line.trim_ascii_start().first().is_none_or(|byte| *byte == b'#')
}

fn count_lines(text: &[u8]) -> usize {
    text.split(|byte| *byte == b'\n').count() - 1
}
