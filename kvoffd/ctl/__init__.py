"""kvoffctl: an ordinary client of the admin service. Imports no other part of the daemon."""
