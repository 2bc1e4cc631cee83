//! Pure: Kubernetes quantities (`500m`, `1.5`, `64Mi`).

/// Parses a quantity into thousandths, rounded up; `None` if it is not a quantity or too large.
pub fn parse_milli(text: &str) -> Option<u64> {
    let split =
        text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(split);
    let (numerator, denominator): (u128, u128) = match suffix {
        "" => (1000, 1),
        "n" => (1, 1_000_000),
        "u" => (1, 1000),
        "m" => (1, 1),
        "k" => (1_000_000, 1),
        "M" => (1_000_000_000, 1),
        "G" => (1_000_000_000_000, 1),
        "T" => (1_000_000_000_000_000, 1),
        "Ki" => (1000 << 10, 1),
        "Mi" => (1000 << 20, 1),
        "Gi" => (1000 << 30, 1),
        "Ti" => (1000 << 40, 1),
        _ => {
            let exponent: u32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            // Larger exponents are cut to 15: such an amount exceeds every node anyway.
            (1000 * 10u128.checked_pow(exponent.min(15))?, 1)
        }
    };
    let (integer, part) = number.split_once('.').unwrap_or((number, ""));
    // Decimals below one billionth, Kubernetes' finest unit (`n`), are dropped.
    let part = &part[..part.len().min(9)];
    let scale = 10u128.pow(part.len() as u32);
    let digits: u128 = format!("{integer}{part}").parse().ok()?;
    let value = digits.checked_mul(numerator)?.div_ceil(scale * denominator);
    u64::try_from(value).ok()
}

/// Parses a quantity into whole units, rounded up.
pub fn parse_units(text: &str) -> Option<u64> {
    parse_milli(text).map(|milli| milli.div_ceil(1000))
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
            ("64Mi", Some(64_000 << 20)),
            ("1e3", Some(1_000_000)),
            ("100n", Some(1)),
            ("abc", None),
            ("", None),
            ("1X", None),
        ] {
            assert_eq!(parse_milli(text), expected, "{text}");
        }
        assert_eq!(parse_units("1.5Ki"), Some(1536));
    }
}
