//! Pure: reads one message after another, as simply as possible.

use super::{
    ReferenceBody, ReferenceHead, ReferenceRequestKind, ReferenceStop, ServerProfile, UnusualForm,
};

/// Reader of messages that continues at offset `at`.
pub(super) struct ReferenceReader<'a> {
    bytes: &'a [u8],
    pub(super) at: usize,
    server: ServerProfile,
    pub(super) unusual_forms: Vec<UnusualForm>,
}

fn is_token(text: &[u8]) -> bool {
    let is_tchar = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    !text.is_empty() && text.iter().all(is_tchar)
}

fn is_blank(byte: &u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

fn is_control(byte: &u8) -> bool {
    byte.is_ascii_control() && !matches!(byte, b'\t' | b'\r')
}

fn trimmed(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = text {
        text = rest;
    }
    text
}

impl<'a> ReferenceReader<'a> {
    pub(super) fn new(bytes: &'a [u8], server: ServerProfile) -> Self {
        Self { bytes, at: 0, server, unusual_forms: Vec::new() }
    }

    /// Records an unusual form; returns an error if the server refuses it.
    fn record_form(&mut self, form: UnusualForm) -> Result<(), ReferenceStop> {
        self.unusual_forms.push(form);
        if self.server.accepts(form) { Ok(()) } else { Err(ReferenceStop::Refused) }
    }

    /// Records an unusual form that a server detects before the end of the line.
    fn record_early_form(&mut self, form: UnusualForm) -> Result<(), ReferenceStop> {
        self.at += 1;
        self.record_form(form)?;
        self.at -= 1;
        Ok(())
    }

    /// Reads the next line, without its end; `alone` is the form of a bare line feed.
    fn read_line(&mut self, alone: UnusualForm) -> Result<&'a [u8], ReferenceStop> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|byte| *byte == b'\n').ok_or(ReferenceStop::Short)?;
        self.at += end + 1;
        match rest[..end].strip_suffix(b"\r") {
            Some(line) => Ok(line),
            None => self.record_form(alone).map(|()| &rest[..end]),
        }
    }

    /// Reads the head of a request: empty lines before it (§2.2), its first line (§3), its headers (§5).
    pub(super) fn read_head(&mut self) -> Result<ReferenceHead, ReferenceStop> {
        while matches!(self.bytes[self.at..], [b'\n', ..] | [b'\r', b'\n', ..]) {
            self.read_line(UnusualForm::LineFeed)?;
        }
        match self.bytes[self.at..] {
            [] | [b'\r'] => return Err(ReferenceStop::Short),
            [b'P', b'R', b'I', b' ', b'*', b' ', b'H', b'T', ..] => {
                self.record_early_form(UnusualForm::Symbol)?
            }
            [byte, ..] if byte.is_ascii_alphabetic() => {}
            [byte, ..] if is_token(&[byte]) => self.record_early_form(UnusualForm::Symbol)?,
            [_, ..] => {
                self.at += 1;
                return Err(ReferenceStop::Refused);
            }
        }
        let first = self.read_line(UnusualForm::LineFeed)?;
        let (kind, is_http10) = self.parse_request_line(first)?;
        let fields = self.read_fields()?;
        let body = self.body_length(&fields, is_http10)?;
        let closes = if is_http10 { !fields.keeps || fields.closes } else { fields.closes };
        Ok(ReferenceHead { end: self.at, kind, closes, says_close: fields.closes, body })
    }

    /// Reads header lines up to the empty one (§5).
    fn read_fields(&mut self) -> Result<FramingFields, ReferenceStop> {
        let mut fields = FramingFields::default();
        let mut lines: Vec<Vec<u8>> = Vec::new();
        loop {
            let line = self.read_line(UnusualForm::LineFeed)?;
            if line.is_empty() {
                break;
            }
            if line[0] == b'\r' {
                return Err(ReferenceStop::Refused);
            }
            if line.contains(&b'\r') {
                self.record_form(UnusualForm::CarriageReturn)?;
                if line.to_ascii_lowercase().starts_with(b"connection:") {
                    self.record_form(UnusualForm::ReturnInConnection)?;
                }
            }
            match lines.last_mut() {
                // §5.2: the line break of a folded line counts as a blank.
                Some(last) if is_blank(&line[0]) => {
                    self.record_form(UnusualForm::Fold)?;
                    let last_line = last.to_ascii_lowercase();
                    let says_close = last_line.starts_with(b"connection:")
                        && trimmed(&last_line).ends_with(b"close");
                    if says_close && trimmed(line).first().is_some_and(|byte| *byte != b',') {
                        self.record_form(UnusualForm::FoldedClose)?;
                    }
                    last.push(b' ');
                    last.extend(line);
                }
                // Without a line before it, a line that begins with a blank has no name.
                _ => lines.push(line.to_vec()),
            }
        }
        for line in &lines {
            self.parse_field(line, &mut fields)?;
        }
        Ok(fields)
    }

    /// Reads a response: interim ones, a status line (§4), headers and a body.
    pub(super) fn read_response(
        &mut self,
        kind: ReferenceRequestKind,
    ) -> Result<(), ReferenceStop> {
        let status = loop {
            let first = self.read_line(UnusualForm::LineFeed)?;
            let digits = first.get(9..12).ok_or(ReferenceStop::Refused)?;
            let status = number_of(digits, 10).ok_or(ReferenceStop::Refused)?;
            if !(100..200).contains(&status) || status == 101 {
                break status;
            }
            self.read_fields()?;
        };
        let mut fields = self.read_fields()?;
        let rest = self.bytes[self.at..].iter().skip_while(|byte| matches!(byte, b'\r' | b'\n'));
        let begin: Vec<u8> = rest.take(4).copied().collect();
        if status == 101 && matches!(begin[..], [0, 0, length, 4] if length % 6 == 0) {
            self.record_form(UnusualForm::Http2Frame)?;
        }
        let becomes_tunnel =
            status == 101 || kind == ReferenceRequestKind::Connect && (200..300).contains(&status);
        if kind == ReferenceRequestKind::Head || becomes_tunnel || status == 204 || status == 304 {
            return Ok(());
        }
        if !fields.codings.is_empty() {
            // §6.3: a coding overrides a length, which clients then ignore.
            fields.lengths.clear();
        }
        let body = self.body_length(&fields, false)?;
        self.read_body(body)
    }

    fn parse_request_line(
        &mut self,
        line: &[u8],
    ) -> Result<(ReferenceRequestKind, bool), ReferenceStop> {
        let words: Vec<&[u8]> = line.split(is_blank).filter(|word| !word.is_empty()).collect();
        let [method, target, version] = words[..] else { return Err(ReferenceStop::Refused) };
        if !is_token(method) {
            return Err(ReferenceStop::Refused);
        }
        if !method.iter().all(u8::is_ascii_uppercase) {
            self.record_form(UnusualForm::Method)?;
        }
        if line.contains(&b'\t') {
            self.record_form(UnusualForm::Tabs)?;
        }
        if line.len() != method.len() + target.len() + version.len() + 2 {
            self.record_form(UnusualForm::Spaces)?;
        }
        if !target.iter().all(u8::is_ascii_graphic) {
            self.record_form(UnusualForm::Target)?;
        }
        match version {
            b"HTTP/1.1" | b"HTTP/1.0" => {}
            [b'H', b'T', b'T', b'P', b'/', b'1', b'.', b'2'..=b'9'] => {
                self.record_form(UnusualForm::Version)?
            }
            _ => return Err(ReferenceStop::Refused),
        }
        let kind = match method {
            b"HEAD" => ReferenceRequestKind::Head,
            b"CONNECT" => ReferenceRequestKind::Connect,
            _ => ReferenceRequestKind::Plain,
        };
        Ok((kind, version == b"HTTP/1.0"))
    }

    fn parse_field(
        &mut self,
        line: &[u8],
        fields: &mut FramingFields,
    ) -> Result<(), ReferenceStop> {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            return self.record_form(UnusualForm::NoColon);
        };
        let (name, value) = (&line[..colon], trimmed(&line[colon + 1..]));
        if name.last().is_some_and(is_blank) {
            // Servers that accept it read another name; only a name without the blank would be what the RFC warns of.
            return self.record_form(UnusualForm::Blank);
        }
        if !is_token(name) {
            return self.record_form(UnusualForm::Name);
        }
        if value.iter().any(is_control) {
            self.record_form(UnusualForm::Value)?;
        }
        let name = name.to_ascii_lowercase();
        if !value.is_ascii() && matches!(&name[..], b"transfer-encoding" | b"connection") {
            self.record_form(UnusualForm::NonAscii)?;
        }
        match &name[..] {
            b"content-length" => fields.lengths.push(value.to_vec()),
            b"transfer-encoding" => fields.codings.push(value.to_vec()),
            b"connection" => {
                let has_token = |token: &[u8]| {
                    value
                        .split(|byte| *byte == b',')
                        .any(|it| trimmed(it).eq_ignore_ascii_case(token))
                };
                fields.closes |= has_token(b"close");
                fields.keeps |= has_token(b"keep-alive");
            }
            _ => {}
        }
        Ok(())
    }

    /// Computes the length of the body (§6.3).
    fn body_length(
        &mut self,
        fields: &FramingFields,
        is_http10: bool,
    ) -> Result<ReferenceBody, ReferenceStop> {
        if fields.lengths.len() > 1 {
            self.record_form(UnusualForm::Lengths)?;
        }
        let mut length = None;
        for value in &fields.lengths {
            if value.contains(&b',') {
                self.record_form(UnusualForm::LengthList)?;
            }
            for number in value.split(|byte| *byte == b',') {
                let number = number_of(trimmed(number), 10).ok_or(ReferenceStop::Refused)?;
                if length.is_some_and(|other| other != number) {
                    return Err(ReferenceStop::Refused);
                }
                length = Some(number);
            }
        }
        if fields.codings.is_empty() {
            return Ok(ReferenceBody::Sized(length.unwrap_or(0)));
        }
        if is_http10 {
            self.record_form(UnusualForm::OldCoding)?;
        }
        if length.is_some() {
            self.record_form(UnusualForm::LengthAndCoding)?;
        }
        let list = fields.codings.join(&b',');
        let mut codings: Vec<&[u8]> = list.split(|byte| *byte == b',').map(trimmed).collect();
        if codings.iter().any(|coding| coding.is_empty()) {
            self.record_form(UnusualForm::EmptyCoding)?;
        }
        codings.retain(|coding| !coding.is_empty());
        if codings.len() > 1 {
            self.record_form(UnusualForm::Codings)?;
        }
        match codings.pop() {
            None => Ok(ReferenceBody::Sized(length.unwrap_or(0))),
            Some(last) if last.eq_ignore_ascii_case(b"chunked") => Ok(ReferenceBody::Chunked),
            Some(_) => Err(ReferenceStop::Refused),
        }
    }

    pub(super) fn read_body(&mut self, body: ReferenceBody) -> Result<(), ReferenceStop> {
        match body {
            ReferenceBody::Sized(length) => self.skip_bytes(length),
            ReferenceBody::Chunked => self.read_chunks(),
        }
    }

    fn skip_bytes(&mut self, length: u64) -> Result<(), ReferenceStop> {
        if length > (self.bytes.len() - self.at) as u64 {
            return Err(ReferenceStop::Short);
        }
        self.at += length as usize;
        Ok(())
    }

    /// Reads a chunked body: sizes and data, then trailers (§7.1).
    fn read_chunks(&mut self) -> Result<(), ReferenceStop> {
        loop {
            let size = self.read_chunk_size()?;
            if size == 0 {
                break;
            }
            self.skip_bytes(size)?;
            match self.bytes[self.at..] {
                [b'\r', b'\n', ..] => self.at += 2,
                [b'\n', ..] => {
                    self.record_form(UnusualForm::ChunkLineFeed)?;
                    self.at += 1;
                }
                [b'\r'] | [] => return Err(ReferenceStop::Short),
                _ => return Err(ReferenceStop::Refused),
            }
        }
        loop {
            let line = self.read_line(UnusualForm::Trailer)?;
            if line.is_empty() {
                return Ok(());
            }
            let colon = line.iter().position(|byte| *byte == b':').unwrap_or(0);
            if !is_token(&line[..colon]) || line[colon..].iter().any(is_control) {
                self.record_form(UnusualForm::Trailer)?;
            }
        }
    }

    fn read_chunk_size(&mut self) -> Result<u64, ReferenceStop> {
        let rest = &self.bytes[self.at..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        let is_odd = |byte: &u8| digits == 0 || !b" \t\r\n;".contains(byte);
        if rest.get(digits).is_some_and(is_odd)
            || digits > 0 && number_of(&rest[..digits], 16).is_none()
        {
            // Servers refuse such a line before its end.
            self.at += 1;
            return Err(ReferenceStop::Refused);
        }
        let line = self.read_line(UnusualForm::ChunkLineFeed)?;
        let text = line.split(|byte| *byte == b';').next().unwrap_or_default();
        let digits = trimmed(text);
        if line.contains(&b'\r') {
            return Err(ReferenceStop::Refused);
        }
        if digits.len() != text.len() {
            self.record_form(UnusualForm::ChunkBlank)?;
        }
        if digits.len() > 16 {
            self.record_form(UnusualForm::ChunkZeros)?;
        }
        number_of(digits, 16).ok_or(ReferenceStop::Refused)
    }
}

/// Headers on which framing and persistence depend.
#[derive(Default)]
struct FramingFields {
    lengths: Vec<Vec<u8>>,
    codings: Vec<Vec<u8>>,
    closes: bool,
    keeps: bool,
}

/// Parses a number of digits only. The few highest values are refused, since no body is that long.
fn number_of(digits: &[u8], radix: u32) -> Option<u64> {
    let text = std::str::from_utf8(digits).ok()?;
    let is_plain = !text.is_empty() && text.chars().all(|letter| letter.is_digit(radix));
    let number = is_plain.then(|| u64::from_str_radix(text, radix).ok())??;
    (number < u64::MAX - 8).then_some(number)
}
