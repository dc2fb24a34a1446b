package nsq

import (
	"fmt"
	"net/url"
	"strings"
)

// What is told to nobody: AuthSecret, and what is a user, a password or a token in the URL of an nsqlookupd.

// concealed stands in a secret's place in texts for people.
const concealed = "xxxxx"

// Format implements [fmt.Formatter] for all verbs: a Config is printed like any struct, but with AuthSecret hidden, so
// that a program may log it.
func (c Config) Format(f fmt.State, verb rune) {
	type plain Config // has no Format
	for i := range options() {
		if o := &options()[i]; o.secret && o.in(&c).Len() > 0 {
			o.in(&c).SetString(concealed)
		}
	}
	fmt.Fprintf(f, fmt.FormatString(f, verb), plain(c))
}

// withoutSecret hides a secret in a text of somebody who was told it, and may say it back.
func withoutSecret(text, secret string) string {
	if secret == "" {
		return text
	}
	return strings.ReplaceAll(text, secret, concealed)
}

// shownAddress is an address as it was given, for people: without what may be a user, a password or a token. It need
// not be a valid one.
func shownAddress(addr string) string {
	rest := addr
	scheme := ""
	if i := strings.Index(addr, "://"); i >= 0 {
		scheme, rest = addr[:i+len("://")], addr[i+len("://"):]
	}
	separator := "?"
	if at := strings.LastIndexByte(rest, '@'); at >= 0 {
		if strings.Contains(rest[:at], "?") { // a password with a question mark in it, or a query that began before
			separator = "&"
		}
		rest = concealed + rest[at:]
	}
	rest, query, found := strings.Cut(rest, separator)
	if !found {
		return scheme + rest
	}
	return scheme + rest + separator + shownQuery(query)
}

// lookupdName is the URL of an nsqlookupd for errors, logs and Status, without secrets.
func lookupdName(u *url.URL) string {
	shown := *u
	if u.User != nil {
		shown.User = url.User(concealed)
	}
	shown.RawQuery = shownQuery(u.RawQuery)
	return shown.String()
}

// shownQuery hides the values of parameters that by their names are secrets.
func shownQuery(query string) string {
	params := strings.FieldsFunc(query, func(r rune) bool { return r == '&' || r == ';' })
	secrets := false
	for i, param := range params {
		if name, value, _ := strings.Cut(param, "="); value != "" && namesSecret(name) {
			params[i], secrets = name+"="+concealed, true
		}
	}
	if !secrets {
		return query
	}
	return strings.Join(params, "&")
}

// namesSecret tells whether a parameter of that name is likely to be a secret: access_token, apiKey, X-Amz-Signature.
func namesSecret(name string) bool {
	if plain, err := url.QueryUnescape(name); err == nil {
		name = plain
	}
	name = strings.ToLower(name)
	for _, word := range []string{"auth", "cred", "key", "pass", "pwd", "secret", "sig", "token"} {
		if strings.Contains(name, word) {
			return true
		}
	}
	return false
}
