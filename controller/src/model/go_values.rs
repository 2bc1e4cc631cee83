//! Pure: values in Go's text forms, with Go's own messages for those that cannot be parsed.
//!
//! Knative reads its ConfigMaps with `strconv` and `time`, so users meet these texts and search for them.

use std::{fmt, time::Duration};

use common::decimal::parse_digits;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// A duration that may be negative, in nanoseconds: Go's `time.Duration`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoDuration(pub i64);

/// One second in nanoseconds.
const NANOS_PER_SECOND: i64 = 1_000_000_000;

impl GoDuration {
    /// A span of whole seconds.
    pub const fn from_secs(seconds: i64) -> Self {
        Self(seconds.saturating_mul(NANOS_PER_SECOND))
    }

    /// Returns true if the span is a whole number of seconds.
    pub const fn is_whole_seconds(self) -> bool {
        self.0 % NANOS_PER_SECOND == 0
    }

    /// The span as a `Duration`; a negative one becomes zero.
    pub fn to_duration(self) -> Duration {
        Duration::from_nanos(u64::try_from(self.0).unwrap_or(0))
    }
}

impl From<Duration> for GoDuration {
    fn from(duration: Duration) -> Self {
        Self(i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX))
    }
}

impl fmt::Display for GoDuration {
    /// Formats the span as Go does: `1h0m0s`, `1m30s`, `1.5s`, `20ms`, `-5s`.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.unsigned_abs();
        if self.0 < 0 {
            out.write_str("-")?;
        }
        match nanos {
            0 => out.write_str("0s"),
            1..1_000 => write!(out, "{nanos}ns"),
            1_000..1_000_000 => write!(out, "{}µs", format_fraction(nanos, 1_000)),
            1_000_000..1_000_000_000 => write!(out, "{}ms", format_fraction(nanos, 1_000_000)),
            _ => {
                let seconds = nanos / 1_000_000_000;
                // Go writes every unit below the largest one, also if it is 0.
                let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
                if hours > 0 {
                    write!(out, "{hours}h")?;
                }
                if seconds >= 60 {
                    write!(out, "{minutes}m")?;
                }
                write!(out, "{}s", format_fraction(nanos % 60_000_000_000, 1_000_000_000))
            }
        }
    }
}

/// Formats `value / unit` with as many decimals as it needs; `unit` is a power of ten.
fn format_fraction(value: u64, unit: u64) -> String {
    let whole = value / unit;
    let width = unit.ilog10() as usize;
    let rest = format!("{:0width$}", value % unit);
    match rest.trim_end_matches('0') {
        "" => whole.to_string(),
        rest => format!("{whole}.{rest}"),
    }
}

/// Parses a boolean as `strconv.ParseBool` does.
pub fn parse_bool(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        other => Err(format!("strconv.ParseBool: parsing {other:?}: invalid syntax")),
    }
}

/// Parses a decimal integer as `strconv.ParseInt` does, for a type of `bits` bits.
pub fn parse_int(text: &str, bits: u32) -> Result<i64, String> {
    let wrong = |reason| Err(format!("strconv.ParseInt: parsing {text:?}: {reason}"));
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    if digits.is_empty() || !digits.bytes().all(|it| it.is_ascii_digit()) {
        return wrong("invalid syntax");
    }
    // Least number of the type; its bitwise complement is the greatest.
    let low = i64::MIN >> (64 - bits);
    match text.parse::<i64>() {
        Ok(value) if value >= low && value <= !low => Ok(value),
        Ok(_) | Err(_) => wrong("value out of range"),
    }
}

/// Parses a decimal number as `strconv.ParseUint` does, for a type of 64 bits. Unlike [`parse_int`] it accepts no sign.
pub fn parse_uint(text: &str) -> Result<u64, String> {
    let is_number = !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let reason = if is_number { "value out of range" } else { "invalid syntax" };
    parse_digits(text).ok_or_else(|| format!("strconv.ParseUint: parsing {text:?}: {reason}"))
}

/// Parses a number as `strconv.ParseFloat` does, but refuses infinity and NaN, which no setting can mean.
pub fn parse_float(text: &str) -> Result<f64, String> {
    let wrong = || format!("strconv.ParseFloat: parsing {text:?}: invalid syntax");
    text.parse::<f64>().ok().filter(|it| it.is_finite()).ok_or_else(wrong)
}

/// Parses a duration as `time.ParseDuration` does.
pub fn parse_duration(text: &str) -> Result<GoDuration, String> {
    let invalid = || format!("time: invalid duration {text:?}");
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    if unsigned == "0" {
        return Ok(GoDuration(0));
    }
    if unsigned.is_empty() {
        return Err(invalid());
    }
    // 128 bits hold any sum of parts, so that only the total is compared with the bounds.
    let (mut rest, mut total) = (unsigned, 0_i128);
    while !rest.is_empty() {
        let end = rest.find(|it: char| !it.is_ascii_digit() && it != '.').unwrap_or(rest.len());
        let (number, after) = rest.split_at(end);
        let unit_end = after.find(|it: char| it.is_ascii_digit() || it == '.');
        let (unit, after) = after.split_at(unit_end.unwrap_or(after.len()));
        // `.5` and `5.` are numbers in Go, `.` alone is not.
        if number.trim_matches('.').is_empty() || number.matches('.').count() > 1 {
            return Err(invalid());
        }
        let scale: i128 = match unit {
            "" => return Err(format!("time: missing unit in duration {text:?}")),
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => NANOS_PER_SECOND.into(),
            "m" => i128::from(NANOS_PER_SECOND) * 60,
            "h" => i128::from(NANOS_PER_SECOND) * 3600,
            unit => return Err(format!("time: unknown unit {unit:?} in duration {text:?}")),
        };
        let nanos = multiply_decimal(number, scale).ok_or_else(invalid)?;
        total = total.checked_add(nanos).ok_or_else(invalid)?;
        rest = after;
    }
    let total = if text.starts_with('-') { -total } else { total };
    i64::try_from(total).map(GoDuration).map_err(|_too_long| invalid())
}

/// Parses a duration as [`parse_duration`] does; `None` if it is negative or invalid.
pub fn parse_unsigned_duration(text: &str) -> Option<Duration> {
    parse_duration(text).ok().filter(|it| it.0 >= 0).map(GoDuration::to_duration)
}

/// Multiplies a decimal number by `scale`, exactly where the result is whole.
fn multiply_decimal(number: &str, scale: i128) -> Option<i128> {
    let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
    let whole: i128 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut total = whole.checked_mul(scale)?;
    // Digits past the eighteenth are below a nanosecond, even of an hour.
    let decimals: String = decimals.chars().take(18).collect();
    if !decimals.is_empty() {
        let part: i128 = decimals.parse().ok()?;
        let places = u32::try_from(decimals.len()).ok()?;
        total += part.checked_mul(scale)? / 10_i128.pow(places);
    }
    Some(total)
}

/// Checks a quantity as `resource.ParseQuantity` does, and keeps its text.
pub fn parse_quantity(text: &str) -> Result<Quantity, String> {
    const RULE: &str = "quantities must match the regular expression \
                        '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let end = unsigned.find(|it: char| !it.is_ascii_digit() && it != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(end);
    if number.matches('.').count() > 1 || !number.bytes().any(|it| it.is_ascii_digit()) {
        return Err(RULE.into());
    }
    // `1E` has a unit, `1E3` an exponent: the digits after the letter decide.
    let exponent = suffix.strip_prefix(['e', 'E']).is_some_and(|power| {
        let digits = power.strip_prefix(['+', '-']).unwrap_or(power);
        !digits.is_empty() && digits.bytes().all(|it| it.is_ascii_digit())
    });
    let unit =
        ["", "n", "u", "m", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    if exponent || unit.contains(&suffix) {
        Ok(Quantity(text.to_owned()))
    // Kubernetes has one message for suffixes of allowed letters, and another for all else.
    } else if suffix.chars().all(|it| "eEinumkKMGTP+-0123456789".contains(it)) {
        Err("unable to parse quantity's suffix".into())
    } else {
        Err(RULE.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_written_as_in_go() {
        for (text, nanos, written) in [
            ("0", 0, "0s"),
            ("30s", 30 * NANOS_PER_SECOND, "30s"),
            ("1m30s", 90 * NANOS_PER_SECOND, "1m30s"),
            ("1.5h", 5400 * NANOS_PER_SECOND, "1h30m0s"),
            ("-5s", -5 * NANOS_PER_SECOND, "-5s"),
            ("1500ms", 1_500_000_000, "1.5s"),
            ("20ms", 20_000_000, "20ms"),
            (".5us", 500, "500ns"),
            ("48h", 172_800 * NANOS_PER_SECOND, "48h0m0s"),
            ("+30s", 30 * NANOS_PER_SECOND, "30s"),
            ("7\u{3bc}s", 7000, "7\u{b5}s"),
        ] {
            let span = parse_duration(text).unwrap();
            assert_eq!((span.0, span.to_string()), (nanos, written.into()), "{text}");
        }
        for (text, error) in [
            ("", r#"time: invalid duration """#),
            ("abc", r#"time: invalid duration "abc""#),
            ("10", r#"time: missing unit in duration "10""#),
            ("10x", r#"time: unknown unit "x" in duration "10x""#),
            ("1.2.3s", r#"time: invalid duration "1.2.3s""#),
            ("99999999999h", r#"time: invalid duration "99999999999h""#),
        ] {
            assert_eq!(parse_duration(text), Err(error.to_owned()));
        }
    }

    #[test]
    fn a_negative_duration_is_no_unsigned_one() {
        let parse = parse_unsigned_duration;
        assert_eq!(parse("+1m30s"), Some(Duration::from_secs(90)));
        assert_eq!((parse("-0s"), parse("-1s"), parse("x")), (Some(Duration::ZERO), None, None));
    }

    #[test]
    fn numbers_and_booleans_are_refused_in_gos_words() {
        assert_eq!(parse_int("+7", 64), Ok(7));
        assert_eq!(parse_int("-2147483648", 32), Ok(i64::from(i32::MIN)));
        let syntax = r#"strconv.ParseInt: parsing "7 ": invalid syntax"#;
        assert_eq!(parse_int("7 ", 64), Err(syntax.into()));
        let range = r#"strconv.ParseInt: parsing "2147483648": value out of range"#;
        assert_eq!(parse_int("2147483648", 32), Err(range.into()));
        assert_eq!(parse_uint("18446744073709551615"), Ok(u64::MAX));
        for (text, reason) in [
            ("+7", "invalid syntax"),
            ("-7", "invalid syntax"),
            ("", "invalid syntax"),
            ("18446744073709551616", "value out of range"),
        ] {
            let error = format!("strconv.ParseUint: parsing {text:?}: {reason}");
            assert_eq!(parse_uint(text), Err(error));
        }
        let maybe = r#"strconv.ParseBool: parsing "maybe": invalid syntax"#;
        assert_eq!(parse_bool("maybe"), Err(maybe.into()));
        assert!(parse_float("NaN").is_err() && parse_float("inf").is_err());
    }

    #[test]
    fn quantities_are_those_of_kubernetes() {
        for text in ["400m", "1", "0.5", "100M", "1Gi", "1e3", "1E-3", "2E", "-1", "5."] {
            assert_eq!(parse_quantity(text), Ok(Quantity(text.into())));
        }
        assert_eq!(parse_quantity("1KM"), Err("unable to parse quantity's suffix".into()));
        for text in ["", "abc", "1 Gi", "1.2.3", "."] {
            let error = parse_quantity(text).unwrap_err();
            assert!(error.starts_with("quantities must match"), "{text}: {error}");
        }
    }
}
