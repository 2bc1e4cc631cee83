//! Pure: the date of a response, in the form of HTTP (RFC 9110 §5.6.7).

/// Number of bytes of a date.
pub const DATE_BYTES: usize = 29;

const DAYS: [&[u8; 3]; 7] = [b"Thu", b"Fri", b"Sat", b"Sun", b"Mon", b"Tue", b"Wed"];
const MONTHS: [&[u8; 3]; 12] = [
    b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec",
];

/// Writes the date of a Unix time in seconds, for years up to 9999: `Sun, 06 Nov 1994 08:49:37 GMT`.
pub fn format_date(unix_s: u64) -> [u8; DATE_BYTES] {
    let (days, second) = (unix_s / 86_400, unix_s % 86_400);
    let (year, month, day) = civil_date(days);
    let mut date = *b"Thu, 01 Jan 1970 00:00:00 GMT";
    date[..3].copy_from_slice(DAYS[index(days % 7)]);
    put_digits(&mut date[5..7], day);
    date[8..11].copy_from_slice(MONTHS[index(month - 1)]);
    put_digits(&mut date[12..16], year);
    put_digits(&mut date[17..19], second / 3_600);
    put_digits(&mut date[20..22], second / 60 % 60);
    put_digits(&mut date[23..25], second % 60);
    date
}

/// Year, month and day of a number of days since 1970 (Howard Hinnant, `civil_from_days`). Years begin in March, so that
/// a leap day is the last one of its year.
fn civil_date(days: u64) -> (u64, u64, u64) {
    // 719 468 days lie between 0000-03-01 and 1970-01-01; an era has 400 years.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

fn index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// Writes the last digits of a number, as many as there is place for.
fn put_digits(to: &mut [u8], mut number: u64) {
    for digit in to.iter_mut().rev() {
        *digit = b'0' + u8::try_from(number % 10).unwrap_or(0);
        number /= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_have_the_form_of_http() {
        for (unix_s, expected) in [
            (0, "Thu, 01 Jan 1970 00:00:00 GMT"),
            (784_111_777, "Sun, 06 Nov 1994 08:49:37 GMT"),
            (951_782_400, "Tue, 29 Feb 2000 00:00:00 GMT"),
            (1_709_251_199, "Thu, 29 Feb 2024 23:59:59 GMT"),
            (1_709_251_200, "Fri, 01 Mar 2024 00:00:00 GMT"),
            (4_107_542_400, "Mon, 01 Mar 2100 00:00:00 GMT"),
            (253_402_300_799, "Fri, 31 Dec 9999 23:59:59 GMT"),
        ] {
            assert_eq!(str::from_utf8(&format_date(unix_s)), Ok(expected), "{unix_s}");
        }
    }
}
