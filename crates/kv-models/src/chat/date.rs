//! `strftime` in UTC, as far as chat templates use it.

use std::fmt::Write;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// Formats a time in seconds since 1970; names what it does not know.
pub(super) fn strftime(format: &str, seconds: u64) -> Result<String, String> {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let month_name = MONTHS[month as usize - 1];
    let weekday = WEEKDAYS[((days + 4) % 7) as usize];

    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let mut code = chars.next();
        let unpadded = code == Some('-');
        if unpadded {
            code = chars.next();
        }
        let two = |text: &mut String, number: u64| match unpadded {
            true => write!(text, "{number}"),
            false => write!(text, "{number:02}"),
        };
        let written = match code {
            Some('Y') => write!(text, "{year}"),
            Some('y') => two(&mut text, year % 100),
            Some('m') => two(&mut text, month),
            Some('d') => two(&mut text, day),
            Some('e') => write!(text, "{day:2}"),
            Some('H') => two(&mut text, hour),
            Some('I') => two(&mut text, (hour + 11) % 12 + 1),
            Some('M') => two(&mut text, minute),
            Some('S') => two(&mut text, second),
            Some('p') => write!(text, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('B') => write!(text, "{month_name}"),
            Some('b') => write!(text, "{}", &month_name[..3]),
            Some('A') => write!(text, "{weekday}"),
            Some('a') => write!(text, "{}", &weekday[..3]),
            Some('F') => write!(text, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(text, "{hour:02}:{minute:02}:{second:02}"),
            Some('%') => write!(text, "%"),
            _ => return Err(format!("strftime_now: unknown code in `{format}`")),
        };
        written.map_err(|error| error.to_string())?;
    }
    Ok(text)
}

/// Year, month and day of a number of days since 1970 (Howard Hinnant's `civil_from_days`: years
/// that start in March, in eras of 400).
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let march_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checked with Python's `datetime.fromtimestamp(t, timezone.utc).strftime(format)`.
    #[test]
    fn dates() {
        let all = "%d %b %Y|%A, %B %-d|%H:%M:%S|%I %p|%F %T|%a %y %m %%";
        for (seconds, expected) in [
            (0, "01 Jan 1970|Thursday, January 1|00:00:00|12 AM|1970-01-01 00:00:00|Thu 70 01 %"),
            (
                951_868_799,
                "29 Feb 2000|Tuesday, February 29|23:59:59|11 PM|2000-02-29 23:59:59|Tue 00 02 %",
            ),
            (
                1_722_000_000,
                "26 Jul 2024|Friday, July 26|13:20:00|01 PM|2024-07-26 13:20:00|Fri 24 07 %",
            ),
            (
                4_107_542_400,
                "01 Mar 2100|Monday, March 1|00:00:00|12 AM|2100-03-01 00:00:00|Mon 00 03 %",
            ),
        ] {
            assert_eq!(strftime(all, seconds).unwrap(), expected);
        }
        assert!(strftime("%Q", 0).is_err());
        assert!(strftime("%", 0).is_err());
    }
}
