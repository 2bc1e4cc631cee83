//! Shell: log of one container: its rotation, and a reader that continues over rotations.
//!
//! The container itself appends to the file, so that its output survives the process of the node. So a rotation copies
//! the end of the file to `….log.1` and truncates the file. The file `….log.start` has the number of bytes that all
//! rotations have copied or left out: the position at which the log now starts. Its lock orders rotations and reads.

use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Size at which a log is rotated: the kubelet's default `containerLogMaxSize`.
pub const MAX_LOG_BYTES: u64 = 10 << 20;
/// Bytes that a container can write during the copy without loss.
const COPY_SLACK_BYTES: u64 = 1 << 20;
/// Highest start of a log. A container can make its log a file with a hole, as long as a file can be: 2⁶³ bytes.
const MAX_START: u64 = 1 << 62;
/// Mode of a log's other files: no more users may read the copy than the log.
const FILE_MODE: u32 = 0o640;

/// Creates the file with the start of a log, so that the first rotation has a lock too.
pub fn create_start_file(log: &Path) -> io::Result<File> {
    // Not for the container's user: its lock would stop rotations.
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(FILE_MODE)
        .open(start_path(log))
}

/// Rotates a log. Returns false if a reader uses it, so that the next attempt may succeed.
///
/// Lines that the container writes between the end of the copy and the truncation are lost.
pub fn rotate(log: &Path) -> io::Result<bool> {
    // Without the file, for instance on a full disk, the log must be truncated all the same.
    let start_file = create_start_file(log).ok();
    match start_file.as_ref().map_or(Ok(()), File::try_lock) {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(false),
        Err(TryLockError::Error(error)) => return Err(error),
    }
    let start = start_file.as_ref().map_or(0, read_start);
    let mut file = OpenOptions::new().read(true).write(true).open(log)?;
    // A container may have written many times the limit since the last check; only the end is kept.
    let begin = file.metadata()?.len().saturating_sub(MAX_LOG_BYTES - COPY_SLACK_BYTES);
    file.seek(SeekFrom::Start(begin))?;
    let copied = create_rotated(log).and_then(|mut rotated| {
        let copied = io::copy(&mut (&file).take(MAX_LOG_BYTES), &mut rotated);
        Ok((copied, rotated.metadata()?.len()))
    });
    // Truncated even if the copy fails because the disk is full: the log must not grow without limit.
    file.set_len(0)?;
    let (copied, length) = copied?;
    if let Some(start_file) = start_file {
        // Always the same number of digits: the file needs no more space of a disk that may be full.
        start_file.write_all_at(format!("{:020}\n", start + begin + length).as_bytes(), 0)?;
    }
    copied.map(|_| true)
}

/// Creates the file for the copy of a log, or empties it. One of an earlier version has another mode.
fn create_rotated(log: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let options = options.write(true).create(true).truncate(true).mode(FILE_MODE);
    let rotated = options.open(rotated_path(log))?;
    rotated.set_permissions(Permissions::from_mode(FILE_MODE))?;
    Ok(rotated)
}

/// Returns the position of the next byte that a container writes; it grows over rotations.
pub fn end_position(log: &Path) -> u64 {
    start_of(log) + fs::metadata(log).map_or(0, |meta| meta.len())
}

/// Returns the offset of a position in the present file; 0 if a rotation has removed its byte.
pub fn offset_of(log: &Path, position: u64) -> u64 {
    position.saturating_sub(start_of(log))
}

fn start_of(log: &Path) -> u64 {
    File::open(start_path(log)).map_or(0, |file| read_start(&file))
}

/// Reader of a log, which continues over rotations.
#[derive(Debug)]
pub struct LogReader {
    log: PathBuf,
    /// Start of the log at the last read.
    start: u64,
    /// Position of the next byte; `None` for the start of the log at the first read.
    position: Option<u64>,
}

impl LogReader {
    /// Returns a reader that begins with the present file.
    pub fn new(log: PathBuf) -> Self {
        Self { log, start: 0, position: None }
    }

    /// Returns a reader that begins with the first byte of the container that is still there.
    pub fn from_first_byte(log: PathBuf) -> Self {
        Self { log, start: 0, position: Some(0) }
    }

    /// Returns the path of the log.
    pub fn path(&self) -> &Path {
        &self.log
    }

    /// Reads what was written since the last call, with the end of `….log.1` before it if the log was rotated since.
    /// Without a log nothing is read. A file that was replaced is read from its beginning.
    ///
    /// With `whole_lines`, a line that has not ended is left for the next call.
    pub fn read_new(&mut self, whole_lines: bool) -> io::Result<Vec<u8>> {
        // A log of an earlier version has no such file before its first rotation.
        let start_file = open_existing(&start_path(&self.log))?;
        if let Some(file) = &start_file {
            file.lock_shared()?;
        }
        let start = start_file.as_ref().map_or(0, read_start);
        let Some(mut file) = open_existing(&self.log)? else { return Ok(Vec::new()) };
        let position = self.next_position(start, file.metadata()?.len());
        let mut bytes = self.read_rotated(start.saturating_sub(position))?;
        // Less than that is left if the log was rotated twice.
        let first = position.max(start) - bytes.len() as u64;
        file.seek(SeekFrom::Start(position.saturating_sub(start)))?;
        file.read_to_end(&mut bytes)?;
        if whole_lines {
            let end = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
            bytes.truncate(end);
        }
        (self.start, self.position) = (start, Some(first + bytes.len() as u64));
        Ok(bytes)
    }

    /// Returns the position of the next byte to read, of a log that starts at `start` and has `length` bytes.
    fn next_position(&self, start: u64, length: u64) -> u64 {
        match self.position {
            None => start,
            // The last read may have got bytes that the copy of the rotation did not.
            Some(position) if start != self.start => position.min(start),
            // No rotation made the file shorter, so it is another one.
            Some(position) if position.saturating_sub(start) > length => start,
            Some(position) => position,
        }
    }

    /// Reads up to `count` last bytes of `….log.1`.
    fn read_rotated(&self, count: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        if count > 0
            && let Some(mut rotated) = open_existing(&rotated_path(&self.log))?
        {
            let begin = rotated.metadata()?.len().saturating_sub(count);
            rotated.seek(SeekFrom::Start(begin))?;
            rotated.read_to_end(&mut bytes)?;
        }
        Ok(bytes)
    }
}

fn rotated_path(log: &Path) -> PathBuf {
    log.with_extension("log.1")
}

fn start_path(log: &Path) -> PathBuf {
    log.with_extension("log.start")
}

/// Reads the start of a log; 0 before the first rotation, and again where positions behind it could overflow.
fn read_start(mut file: &File) -> u64 {
    let mut text = String::new();
    let read = file.read_to_string(&mut text);
    let start = read.ok().and_then(|_| text.trim().parse::<u64>().ok());
    start.filter(|&start| start <= MAX_START).unwrap_or(0)
}

/// Opens a file to read; `None` if there is none.
fn open_existing(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        file => file.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// Log in a temporary folder, which is removed at the end of the test.
    struct LogFixture {
        folder: PathBuf,
        log: PathBuf,
    }

    impl LogFixture {
        fn new(test: &str) -> Self {
            let name = format!("rouse-container-log-{test}-{}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            fs::create_dir_all(&folder).unwrap();
            let log = folder.join("web.log");
            fs::write(&log, "").unwrap();
            Self { folder, log }
        }

        fn write(&self, text: &str) {
            let mut log = OpenOptions::new().append(true).open(&self.log).unwrap();
            log.write_all(text.as_bytes()).unwrap();
        }
    }

    impl Drop for LogFixture {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.folder).unwrap();
        }
    }

    fn read(reader: &mut LogReader) -> String {
        String::from_utf8(reader.read_new(true).unwrap()).unwrap()
    }

    #[test]
    fn lines_before_a_rotation_are_read_after_it() {
        let fixture = LogFixture::new("before");
        let mut reader = LogReader::new(fixture.log.clone());
        fixture.write("one\n");
        assert_eq!(read(&mut reader), "one\n");
        fixture.write("two\nthr");
        assert_eq!(read(&mut reader), "two\n");
        fixture.write("ee\nfo");
        assert!(rotate(&fixture.log).unwrap());
        assert_eq!(read(&mut reader), "three\n");
        fixture.write("ur\nfive\n");
        assert_eq!(read(&mut reader), "four\nfive\n");
        assert_eq!(read(&mut reader), "");
    }

    #[test]
    fn a_log_that_is_longer_than_before_its_rotation_is_read_from_its_start() {
        let fixture = LogFixture::new("longer");
        let mut reader = LogReader::new(fixture.log.clone());
        fixture.write("a\n");
        assert_eq!(read(&mut reader), "a\n");
        fixture.write("b\n");
        assert!(rotate(&fixture.log).unwrap());
        fixture.write("longer than both\n");
        assert_eq!(read(&mut reader), "b\nlonger than both\n");
    }

    #[test]
    fn after_two_rotations_each_line_that_is_left_is_read_once() {
        let fixture = LogFixture::new("twice");
        let mut reader = LogReader::new(fixture.log.clone());
        fixture.write("a\n");
        assert_eq!(read(&mut reader), "a\n");
        for line in ["b\n", "c\n"] {
            fixture.write(line);
            assert!(rotate(&fixture.log).unwrap());
        }
        fixture.write("d\n");
        assert_eq!(read(&mut reader), "c\nd\n");
        fixture.write("e\n");
        assert_eq!(read(&mut reader), "e\n");
        assert_eq!(read(&mut LogReader::new(fixture.log.clone())), "d\ne\n", "the present file");
        let mut first = LogReader::from_first_byte(fixture.log.clone());
        assert_eq!(read(&mut first), "c\nd\ne\n");
    }

    #[test]
    fn bytes_that_the_rotation_did_not_copy_are_not_read_again() {
        let fixture = LogFixture::new("lost");
        let mut reader = LogReader::new(fixture.log.clone());
        fixture.write("a\n");
        assert!(rotate(&fixture.log).unwrap());
        fixture.write("b\n");
        assert_eq!(read(&mut reader), "b\n");
        // As if the container had written this line after the copy, and the reader had read it before the truncation.
        reader.position = reader.position.map(|position| position + 5);
        fixture.write("c\n");
        assert!(rotate(&fixture.log).unwrap());
        fixture.write("d\n");
        assert_eq!(read(&mut reader), "d\n");
    }

    #[test]
    fn a_rotation_does_not_disturb_a_reader_and_keeps_a_bounded_end() {
        let fixture = LogFixture::new("bounded");
        fixture.write(&"0123456789abcde\n".repeat(1 << 20));
        let start_file = create_start_file(&fixture.log).unwrap();
        start_file.lock_shared().unwrap();
        assert!(!rotate(&fixture.log).unwrap());
        assert_eq!(fs::metadata(&fixture.log).unwrap().len(), 16 << 20);
        start_file.unlock().unwrap();
        assert!(rotate(&fixture.log).unwrap());
        assert_eq!(fs::metadata(&fixture.log).unwrap().len(), 0);
        let rotated = fs::metadata(rotated_path(&fixture.log)).unwrap().len();
        assert_eq!(rotated, MAX_LOG_BYTES - COPY_SLACK_BYTES);
        fixture.write("next\n");
        let mut reader = LogReader::from_first_byte(fixture.log.clone());
        assert_eq!(read(&mut reader).len() as u64, rotated + 5);
    }

    #[test]
    fn the_output_of_a_run_is_found_after_a_rotation() {
        let fixture = LogFixture::new("run");
        fixture.write("first run\n");
        let begin = end_position(&fixture.log);
        assert_eq!((begin, offset_of(&fixture.log, begin)), (10, 10));
        fixture.write("second");
        assert!(rotate(&fixture.log).unwrap());
        fixture.write("a line that is longer than the first run\n");
        assert_eq!(offset_of(&fixture.log, begin), 0);
        let next = end_position(&fixture.log);
        assert_eq!((next, offset_of(&fixture.log, next)), (57, 41));
    }

    #[test]
    fn positions_do_not_overflow_however_long_a_container_makes_its_log() {
        let fixture = LogFixture::new("long");
        fs::write(start_path(&fixture.log), format!("{:020}\n", u64::MAX - 2)).unwrap();
        fixture.write("one\n");
        assert_eq!(end_position(&fixture.log), 4);
        assert!(rotate(&fixture.log).unwrap());
        fixture.write("two\n");
        assert_eq!(end_position(&fixture.log), 8);
        let mut first = LogReader::from_first_byte(fixture.log.clone());
        assert_eq!(read(&mut first), "one\ntwo\n");
    }

    #[test]
    fn no_more_users_may_read_a_rotated_log_than_the_log() {
        let fixture = LogFixture::new("rights");
        fixture.write("password\n");
        // As an earlier version left it.
        fs::write(rotated_path(&fixture.log), "").unwrap();
        assert!(rotate(&fixture.log).unwrap());
        for file in [rotated_path(&fixture.log), start_path(&fixture.log)] {
            let mode = fs::metadata(&file).unwrap().permissions().mode();
            assert_eq!(mode & 0o137, 0, "{}: {mode:o}", file.display());
        }
    }

    #[test]
    fn a_file_that_was_replaced_is_read_from_its_beginning() {
        let fixture = LogFixture::new("replaced");
        let mut reader = LogReader::new(fixture.log.clone());
        fixture.write("one\ntwo\n");
        assert_eq!(read(&mut reader), "one\ntwo\n");
        fs::write(&fixture.log, "new\n").unwrap();
        assert_eq!(read(&mut reader), "new\n");
        fs::remove_file(&fixture.log).unwrap();
        assert_eq!(read(&mut reader), "");
    }
}
