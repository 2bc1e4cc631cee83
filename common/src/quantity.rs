//! Pure: Kubernetes quantities (`500m`, `1.5`, `64Mi`, `1e3`).

/// Largest amount of a quantity in Kubernetes; a larger one is cut to it.
const MAX: u64 = i64::MAX as u64;
/// Number of significant digits that are read: times 2^60 they still fit in 128 bits. Further ones round up.
const MAX_DIGITS: usize = 20;

/// Parses a quantity into thousandths, rounded up; `None` if it is not a quantity, or negative.
pub fn parse_milli(text: &str) -> Option<u64> {
    parse_scaled(text, 3)
}

/// Parses a quantity into whole units, rounded up; `None` if it is not a quantity, or negative.
pub fn parse_units(text: &str) -> Option<u64> {
    parse_scaled(text, 0)
}

/// Parses a quantity and multiplies it by `10^scale`.
fn parse_scaled(text: &str, scale: i64) -> Option<u64> {
    let text = text.strip_prefix('+').unwrap_or(text);
    let split =
        text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let (integer, decimals) = number.split_once('.').unwrap_or((number, ""));
    let all_digits = format!("{integer}{decimals}");
    if all_digits.is_empty() || all_digits.contains('.') {
        return None;
    }
    let (shift, exponent) = parse_suffix(suffix)?;
    let significant = all_digits.trim_start_matches('0');
    let (digits, dropped) = significant.split_at(significant.len().min(MAX_DIGITS));
    // Without a significant digit the amount is zero.
    let digits: u128 = digits.parse().unwrap_or_default();
    let number = (digits + u128::from(dropped.contains(|digit: char| digit != '0'))) << shift;
    let exponent = exponent
        .saturating_add(scale)
        .saturating_sub(decimals.len() as i64)
        .saturating_add(dropped.len() as i64);
    // A power that does not fit is replaced by `u128::MAX`: zero stays zero. Any other amount becomes `MAX`, or 1 if
    // the exponent is negative.
    let power = u32::try_from(exponent.unsigned_abs()).ok();
    let power = power.and_then(|power| 10u128.checked_pow(power)).unwrap_or(u128::MAX);
    let amount = if exponent < 0 { number.div_ceil(power) } else { number.saturating_mul(power) };
    Some(u64::try_from(amount).unwrap_or(MAX).min(MAX))
}

/// Returns a suffix as powers of 2 and of 10.
fn parse_suffix(suffix: &str) -> Option<(u32, i64)> {
    Some(match suffix {
        "" => (0, 0),
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        // `E` alone is a suffix; with a number behind it, it begins an exponent.
        _ => (0, suffix.strip_prefix(['e', 'E'])?.parse().ok()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        for (text, expected) in [
            ("500m", Some(500)),
            ("1.5", Some(1500)),
            ("0.1", Some(100)),
            ("2", Some(2000)),
            ("+2", Some(2000)),
            (".5", Some(500)),
            ("5.", Some(5000)),
            ("64Mi", Some(64_000 << 20)),
            ("1e3", Some(1_000_000)),
            ("1E3", Some(1_000_000)),
            ("1e+3", Some(1_000_000)),
            ("1e-3", Some(1)),
            ("25E-1", Some(2500)),
            ("100n", Some(1)),
            ("1500u", Some(2)),
            ("1e-100", Some(1)),
            ("0e100", Some(0)),
            ("0Ei", Some(0)),
            ("0.0000000000000000001", Some(1)),
            ("0.0000000000000000001e19", Some(1000)),
            ("1.0000000000000000000", Some(1000)),
            ("0.00000000000000000000000", Some(0)),
            ("abc", None),
            ("", None),
            (".", None),
            ("m", None),
            ("-1", None),
            ("1e", None),
            ("1e1.5", None),
            ("1.1.M", None),
            ("1.000000000000000000.5", None),
            ("1.00000000000000000000000.5", None),
            ("1i", None),
            ("0.1mi", None),
            ("1 ", None),
            ("1X", None),
        ] {
            assert_eq!(parse_milli(text), expected, "{text}");
        }
    }

    #[test]
    fn large_quantities_are_cut_to_the_largest_of_kubernetes() {
        for (text, expected) in [
            ("1.5Ki", 1536),
            ("1P", 1_000_000_000_000_000),
            ("1E", 1_000_000_000_000_000_000),
            ("1Pi", 1 << 50),
            ("1Ei", 1 << 60),
            ("1e18", 1_000_000_000_000_000_000),
            ("8Ei", i64::MAX as u64),
            ("100E", i64::MAX as u64),
            ("1e100", i64::MAX as u64),
            ("10000000000000000000000000000000000000000", i64::MAX as u64),
            ("1000.000000000000000000Ei", i64::MAX as u64),
            ("99999999999999999999999Ei", i64::MAX as u64),
            ("10000000000000000000000000000000000000000e-40", 1),
            ("1.000000000000000000Ei", 1 << 60),
            ("1.0000000000000000001", 2),
            ("1.000000000000000000000000001", 2),
        ] {
            assert_eq!(parse_units(text), Some(expected), "{text}");
        }
        assert_eq!(parse_milli("1E"), Some(i64::MAX as u64));
    }
}
