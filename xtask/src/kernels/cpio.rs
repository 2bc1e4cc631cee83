//! Pure: archives in the format that the kernel unpacks as its first files (`newc`, Linux
//! Documentation/driver-api/early-userspace/buffer-format.rst).

/// An archive under construction.
#[derive(Debug, Default)]
pub(crate) struct CpioArchive {
    bytes: Vec<u8>,
    /// Inode number of the last entry.
    last_inode: u32,
}

/// Mode bits, as in `stat`, of directories and programs.
const DIRECTORY_MODE: u32 = 0o040_755;
const PROGRAM_MODE: u32 = 0o100_755;
/// Alignment of file contents, and of headers with their names, in bytes.
const ALIGNMENT: usize = 4;
/// Name of the entry that ends an archive.
const TRAILER_NAME: &str = "TRAILER!!!";

impl CpioArchive {
    /// Adds a directory. Its files must be added after it.
    pub(crate) fn add_directory(&mut self, path: &str) {
        self.add_entry(path, DIRECTORY_MODE, &[]);
    }

    /// Adds a file that all users may read and execute.
    pub(crate) fn add_file(&mut self, path: &str, content: &[u8]) {
        self.add_entry(path, PROGRAM_MODE, content);
    }

    /// Returns the bytes of the complete archive.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.add_entry(TRAILER_NAME, 0, &[]);
        self.bytes
    }

    fn add_entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.last_inode += 1;
        // Inode, mode, owner, group, links, time, size, major and minor of the file's device, major and minor of a
        // device node, length of the name with its zero byte, checksum (0 in this format): eight hexadecimal digits
        // each.
        let size = u32::try_from(content.len()).expect("files of a few MB");
        let name = u32::try_from(path.len() + 1).expect("short names");
        let fields = [self.last_inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name, 0];
        self.bytes.extend(b"070701");
        self.bytes.extend(fields.iter().flat_map(|field| format!("{field:08x}").into_bytes()));
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGNMENT), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_headers_names_and_contents_at_multiples_of_four() {
        let mut archive = CpioArchive::default();
        archive.add_directory("bin");
        archive.add_file("init", b"hello");
        let text = String::from_utf8(archive.finish()).unwrap();
        let field = "00000000";
        let folder = format!("070701{:08x}{:08x}{field}{field}{:08x}", 1, DIRECTORY_MODE, 1)
            + &format!("{field}{:08x}{}{:08x}{field}bin\0\0\0", 0, field.repeat(4), 4);
        assert!(text.starts_with(&folder), "{text}");
        let rest = &text[folder.len()..];
        assert_eq!(&rest[..6], "070701");
        // The name with its end makes 115 bytes of the header's 110.
        assert_eq!(&rest[110..124], "init\0\0hello\0\0\0");
        assert!(rest[124..].starts_with("070701") && rest[124..].contains(TRAILER_NAME));
        assert_eq!(text.len() % ALIGNMENT, 0);
    }
}
