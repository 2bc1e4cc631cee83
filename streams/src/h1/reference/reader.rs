//! Pure: reads one message after another, as simply as possible.

use super::{Body, Head, Kind, Odd, Server, Stop};

/// Reader of messages that continues at offset `at`.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    pub(super) at: usize,
    server: Server,
    pub(super) odd: Vec<Odd>,
}

fn is_token(text: &[u8]) -> bool {
    let letter = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    !text.is_empty() && text.iter().all(letter)
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

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8], server: Server) -> Self {
        Self { bytes, at: 0, server, odd: Vec::new() }
    }

    /// Records an unusual form; returns an error if the server refuses it.
    fn meets(&mut self, odd: Odd) -> Result<(), Stop> {
        self.odd.push(odd);
        if self.server.takes(odd) { Ok(()) } else { Err(Stop::Refused) }
    }

    /// Records an unusual form that a server detects before the end of the line.
    fn early(&mut self, odd: Odd) -> Result<(), Stop> {
        self.at += 1;
        self.meets(odd)?;
        self.at -= 1;
        Ok(())
    }

    /// Reads the next line, without its end; `alone` is the form of a bare line feed.
    fn line(&mut self, alone: Odd) -> Result<&'a [u8], Stop> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().position(|byte| *byte == b'\n').ok_or(Stop::Short)?;
        self.at += end + 1;
        match rest[..end].strip_suffix(b"\r") {
            Some(line) => Ok(line),
            None => self.meets(alone).map(|()| &rest[..end]),
        }
    }

    /// Reads the head of a request: empty lines before it (§2.2), its first line (§3), its headers (§5).
    pub(super) fn head(&mut self) -> Result<Head, Stop> {
        while matches!(self.bytes[self.at..], [b'\n', ..] | [b'\r', b'\n', ..]) {
            self.line(Odd::LineFeed)?;
        }
        match self.bytes[self.at..] {
            [] | [b'\r'] => return Err(Stop::Short),
            [b'P', b'R', b'I', b' ', b'*', b' ', b'H', b'T', ..] => self.early(Odd::Symbol)?,
            [byte, ..] if byte.is_ascii_alphabetic() => {}
            [byte, ..] if is_token(&[byte]) => self.early(Odd::Symbol)?,
            [_, ..] => {
                self.at += 1;
                return Err(Stop::Refused);
            }
        }
        let first = self.line(Odd::LineFeed)?;
        let (kind, is_old) = self.request_line(first)?;
        let fields = self.fields()?;
        let body = self.length(&fields, is_old)?;
        let closes = if is_old { !fields.keeps || fields.closes } else { fields.closes };
        Ok(Head { end: self.at, kind, closes, says_close: fields.closes, body })
    }

    /// Reads header lines up to the empty one (§5).
    fn fields(&mut self) -> Result<Fields, Stop> {
        let mut fields = Fields::default();
        let mut lines: Vec<Vec<u8>> = Vec::new();
        loop {
            let line = self.line(Odd::LineFeed)?;
            if line.is_empty() {
                break;
            }
            if line[0] == b'\r' {
                return Err(Stop::Refused);
            }
            if line.contains(&b'\r') {
                self.meets(Odd::Return)?;
                if line.to_ascii_lowercase().starts_with(b"connection:") {
                    self.meets(Odd::ReturnedClose)?;
                }
            }
            match lines.last_mut() {
                // §5.2: the line break of a folded line counts as a blank.
                Some(last) if is_blank(&line[0]) => {
                    self.meets(Odd::Fold)?;
                    let before = last.to_ascii_lowercase();
                    let says_close =
                        before.starts_with(b"connection:") && trimmed(&before).ends_with(b"close");
                    if says_close && trimmed(line).first().is_some_and(|byte| *byte != b',') {
                        self.meets(Odd::FoldedClose)?;
                    }
                    last.push(b' ');
                    last.extend(line);
                }
                // Without a line before it, a line that begins with a blank has no name.
                _ => lines.push(line.to_vec()),
            }
        }
        for line in &lines {
            self.field(line, &mut fields)?;
        }
        Ok(fields)
    }

    /// Reads a response: interim ones, a status line (§4), headers and a body.
    pub(super) fn answer(&mut self, kind: Kind) -> Result<(), Stop> {
        let status = loop {
            let first = self.line(Odd::LineFeed)?;
            let digits = first.get(9..12).ok_or(Stop::Refused)?;
            let status = number_of(digits, 10).ok_or(Stop::Refused)?;
            if !(100..200).contains(&status) || status == 101 {
                break status;
            }
            self.fields()?;
        };
        let mut fields = self.fields()?;
        let rest = self.bytes[self.at..].iter().skip_while(|byte| matches!(byte, b'\r' | b'\n'));
        let begin: Vec<u8> = rest.take(4).copied().collect();
        if status == 101 && matches!(begin[..], [0, 0, length, 4] if length % 6 == 0) {
            self.meets(Odd::Frame)?;
        }
        let opens = status == 101 || kind == Kind::Connect && (200..300).contains(&status);
        if kind == Kind::Head || opens || status == 204 || status == 304 {
            return Ok(());
        }
        if !fields.codings.is_empty() {
            // §6.3: a coding overrides a length, which clients then ignore.
            fields.lengths.clear();
        }
        let body = self.length(&fields, false)?;
        self.body(body)
    }

    fn request_line(&mut self, line: &[u8]) -> Result<(Kind, bool), Stop> {
        let words: Vec<&[u8]> = line.split(is_blank).filter(|word| !word.is_empty()).collect();
        let [method, target, version] = words[..] else { return Err(Stop::Refused) };
        if !is_token(method) {
            return Err(Stop::Refused);
        }
        if !method.iter().all(u8::is_ascii_uppercase) {
            self.meets(Odd::Method)?;
        }
        if line.contains(&b'\t') {
            self.meets(Odd::Tabs)?;
        }
        if line.len() != method.len() + target.len() + version.len() + 2 {
            self.meets(Odd::Spaces)?;
        }
        if !target.iter().all(u8::is_ascii_graphic) {
            self.meets(Odd::Target)?;
        }
        match version {
            b"HTTP/1.1" | b"HTTP/1.0" => {}
            [b'H', b'T', b'T', b'P', b'/', b'1', b'.', b'2'..=b'9'] => self.meets(Odd::Version)?,
            _ => return Err(Stop::Refused),
        }
        let kind = match method {
            b"HEAD" => Kind::Head,
            b"CONNECT" => Kind::Connect,
            _ => Kind::Plain,
        };
        Ok((kind, version == b"HTTP/1.0"))
    }

    fn field(&mut self, line: &[u8], fields: &mut Fields) -> Result<(), Stop> {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else {
            return self.meets(Odd::Colon);
        };
        let (name, value) = (&line[..colon], trimmed(&line[colon + 1..]));
        if name.last().is_some_and(is_blank) {
            // Servers that accept it read another name; only a name without the blank would be what the RFC warns of.
            return self.meets(Odd::Blank);
        }
        if !is_token(name) {
            return self.meets(Odd::Name);
        }
        if value.iter().any(is_control) {
            self.meets(Odd::Value)?;
        }
        let name = name.to_ascii_lowercase();
        if !value.is_ascii() && matches!(&name[..], b"transfer-encoding" | b"connection") {
            self.meets(Odd::Letter)?;
        }
        match &name[..] {
            b"content-length" => fields.lengths.push(value.to_vec()),
            b"transfer-encoding" => fields.codings.push(value.to_vec()),
            b"connection" => {
                let says = |wanted: &[u8]| {
                    value
                        .split(|byte| *byte == b',')
                        .any(|it| trimmed(it).eq_ignore_ascii_case(wanted))
                };
                fields.closes |= says(b"close");
                fields.keeps |= says(b"keep-alive");
            }
            _ => {}
        }
        Ok(())
    }

    /// Computes the length of the body (§6.3).
    fn length(&mut self, fields: &Fields, is_old: bool) -> Result<Body, Stop> {
        if fields.lengths.len() > 1 {
            self.meets(Odd::Lengths)?;
        }
        let mut length = None;
        for value in &fields.lengths {
            if value.contains(&b',') {
                self.meets(Odd::LengthList)?;
            }
            for number in value.split(|byte| *byte == b',') {
                let number = number_of(trimmed(number), 10).ok_or(Stop::Refused)?;
                if length.is_some_and(|other| other != number) {
                    return Err(Stop::Refused);
                }
                length = Some(number);
            }
        }
        if fields.codings.is_empty() {
            return Ok(Body::Sized(length.unwrap_or(0)));
        }
        if is_old {
            self.meets(Odd::OldCoding)?;
        }
        if length.is_some() {
            self.meets(Odd::Both)?;
        }
        let list = fields.codings.join(&b',');
        let mut codings: Vec<&[u8]> = list.split(|byte| *byte == b',').map(trimmed).collect();
        if codings.iter().any(|coding| coding.is_empty()) {
            self.meets(Odd::NoCoding)?;
        }
        codings.retain(|coding| !coding.is_empty());
        if codings.len() > 1 {
            self.meets(Odd::Codings)?;
        }
        match codings.pop() {
            None => Ok(Body::Sized(length.unwrap_or(0))),
            Some(last) if last.eq_ignore_ascii_case(b"chunked") => Ok(Body::Chunked),
            Some(_) => Err(Stop::Refused),
        }
    }

    pub(super) fn body(&mut self, body: Body) -> Result<(), Stop> {
        match body {
            Body::Sized(length) => self.pass(length),
            Body::Chunked => self.chunks(),
        }
    }

    fn pass(&mut self, length: u64) -> Result<(), Stop> {
        if length > (self.bytes.len() - self.at) as u64 {
            return Err(Stop::Short);
        }
        self.at += length as usize;
        Ok(())
    }

    /// Reads a chunked body: sizes and data, then trailers (§7.1).
    fn chunks(&mut self) -> Result<(), Stop> {
        loop {
            let size = self.size()?;
            if size == 0 {
                break;
            }
            self.pass(size)?;
            match self.bytes[self.at..] {
                [b'\r', b'\n', ..] => self.at += 2,
                [b'\n', ..] => {
                    self.meets(Odd::ChunkLineFeed)?;
                    self.at += 1;
                }
                [b'\r'] | [] => return Err(Stop::Short),
                _ => return Err(Stop::Refused),
            }
        }
        loop {
            let line = self.line(Odd::Trailer)?;
            if line.is_empty() {
                return Ok(());
            }
            let colon = line.iter().position(|byte| *byte == b':').unwrap_or(0);
            if !is_token(&line[..colon]) || line[colon..].iter().any(is_control) {
                self.meets(Odd::Trailer)?;
            }
        }
    }

    fn size(&mut self) -> Result<u64, Stop> {
        let rest = &self.bytes[self.at..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        let is_odd = |byte: &u8| digits == 0 || !b" \t\r\n;".contains(byte);
        if rest.get(digits).is_some_and(is_odd)
            || digits > 0 && number_of(&rest[..digits], 16).is_none()
        {
            // Servers refuse such a line before its end.
            self.at += 1;
            return Err(Stop::Refused);
        }
        let line = self.line(Odd::ChunkLineFeed)?;
        let text = line.split(|byte| *byte == b';').next().unwrap_or_default();
        let digits = trimmed(text);
        if line.contains(&b'\r') {
            return Err(Stop::Refused);
        }
        if digits.len() != text.len() {
            self.meets(Odd::ChunkBlank)?;
        }
        if digits.len() > 16 {
            self.meets(Odd::ChunkZeros)?;
        }
        number_of(digits, 16).ok_or(Stop::Refused)
    }
}

/// Headers on which framing and persistence depend.
#[derive(Default)]
struct Fields {
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
